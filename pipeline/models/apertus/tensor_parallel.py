"""Tensor-parallel table of Apertus (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

from pipeline.models.llama import tensor_parallel as llama

TENSOR_PARALLEL: dict[str, str] = {
    **{name: role for name, role in llama.DENSE.items() if name != "blocks.*.mlp.gate.weight"},
    # replicated, but applied to each rank's own heads and hidden units
    "blocks.*.attention.query_norm.weight": "partial",
    "blocks.*.attention.key_norm.weight": "partial",
    "blocks.*.mlp.activation.*": "partial",
}
