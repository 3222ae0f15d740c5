"""Tensor-parallel table of Gemma 3 (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

from pipeline.models.llama import tensor_parallel as llama

TENSOR_PARALLEL: dict[str, str] = {
    **llama.DENSE,
    # replicated, but applied to each rank's own heads
    "blocks.*.attention.query_norm.weight": "partial",
    "blocks.*.attention.key_norm.weight": "partial",
    "blocks.*.post_attention_norm.weight": "replicate",
    "blocks.*.post_mlp_norm.weight": "replicate",
}
