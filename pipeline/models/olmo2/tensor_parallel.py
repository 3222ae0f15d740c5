"""Tensor-parallel table of OLMo 2 (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

from pipeline.models.llama import tensor_parallel as llama

TENSOR_PARALLEL: dict[str, str] = {
    **{name: role for name, role in llama.DENSE.items() if not name.startswith(("blocks.*.attention_norm", "blocks.*.mlp_norm"))},
    # over the heads of all ranks
    "blocks.*.attention.query_norm.weight": "column",
    "blocks.*.attention.key_norm.weight": "column",
    "blocks.*.post_attention_norm.weight": "replicate",
    "blocks.*.post_mlp_norm.weight": "replicate",
}
