"""Tensor-parallel table of OLMoE (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

from pipeline.models.mixtral import tensor_parallel as mixtral

TENSOR_PARALLEL: dict[str, str] = {
    **mixtral.TENSOR_PARALLEL,
    # over the heads of all ranks
    "blocks.*.attention.query_norm.weight": "column",
    "blocks.*.attention.key_norm.weight": "column",
}
