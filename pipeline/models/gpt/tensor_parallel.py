"""Tensor-parallel table of GPT (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

TENSOR_PARALLEL: dict[str, str] = {
    "embed.tokens.weight": "vocab",
    "embed.positions.weight": "replicate",
    "blocks.*.attention_norm.*": "replicate",
    "blocks.*.attention.query.*": "column",
    "blocks.*.attention.key.*": "column",
    "blocks.*.attention.value.*": "column",
    "blocks.*.attention.output.weight": "row",
    "blocks.*.attention.output.bias": "replicate",
    "blocks.*.mlp_norm.*": "replicate",
    "blocks.*.mlp.up.*": "column",
    "blocks.*.mlp.down.weight": "row",
    "blocks.*.mlp.down.bias": "replicate",
    "norm.*": "replicate",
    "head.weight": "vocab",
}
