"""Tensor-parallel table of ModernBERT (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

from pipeline.models.llama import tensor_parallel as llama

TENSOR_PARALLEL: dict[str, str] = {
    **{name: role for name, role in llama.DENSE.items() if name != "head.weight"},
    "embed.norm.weight": "replicate",
    "head.dense.weight": "replicate",
    "head.norm.weight": "replicate",
    "head.output.*": "vocab",
}
