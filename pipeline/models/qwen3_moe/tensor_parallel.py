"""Tensor-parallel table of Qwen3-MoE (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

from pipeline.models.mixtral import tensor_parallel as mixtral

TENSOR_PARALLEL: dict[str, str] = {
    **mixtral.TENSOR_PARALLEL,
    # replicated, but applied to each rank's own heads
    "blocks.*.attention.query_norm.weight": "partial",
    "blocks.*.attention.key_norm.weight": "partial",
    "blocks.*.mlp.gate.weight": "column",
    "blocks.*.mlp.up.weight": "column",
    "blocks.*.mlp.down.weight": "row",
}
