"""Tensor-parallel table of Qwen3-Next (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

from pipeline.models.deepseek_v3 import tensor_parallel as deepseek_v3
from pipeline.models.llama import tensor_parallel as llama

TENSOR_PARALLEL: dict[str, str] = {
    **llama.DENSE,
    **{f"blocks.*.{name}": role for name, role in deepseek_v3.BLOCK.items() if name.startswith("mlp.") and not name.endswith("bias")},
    "blocks.*.mlp.shared_gate.weight": "replicate",
    # full and linear attention
    "blocks.*.attention.gate.weight": "column",
    # full attention; replicated, but applied to each rank's own heads
    "blocks.*.attention.query_norm.weight": "partial",
    "blocks.*.attention.key_norm.weight": "partial",
    # linear attention: a rank has whole key heads with their value heads
    "blocks.*.attention.beta.weight": "column",
    "blocks.*.attention.decay.weight": "column",
    "blocks.*.attention.query_conv": "column",
    "blocks.*.attention.key_conv": "column",
    "blocks.*.attention.value_conv": "column",
    "blocks.*.attention.decay_rate_log": "column",
    "blocks.*.attention.decay_bias": "column",
    "blocks.*.attention.output_norm.weight": "partial",
}
