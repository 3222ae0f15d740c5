"""Tensor-parallel table of GLM-4.5 (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

from pipeline.models.deepseek_v3.tensor_parallel import table

TENSOR_PARALLEL = table(
    {
        **{f"attention.{name}.{leaf}": "column" for name in ("query", "key", "value") for leaf in ("weight", "bias")},
        "attention.output.weight": "row",
        # replicated, but applied to each rank's own heads
        "attention.query_norm.weight": "partial",
        "attention.key_norm.weight": "partial",
    }
)
