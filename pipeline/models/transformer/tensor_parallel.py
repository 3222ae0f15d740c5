"""Tensor-parallel table of the Transformer (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

TENSOR_PARALLEL: dict[str, str] = {
    "embed.tokens.weight": "vocab",
    "blocks.*_norm.*": "replicate",
    "blocks.*.query.*": "column",
    "blocks.*.key.*": "column",
    "blocks.*.value.*": "column",
    "blocks.*.output.weight": "row",
    "blocks.*.output.bias": "replicate",
    "blocks.*.mlp.up.*": "column",
    "blocks.*.mlp.down.weight": "row",
    "blocks.*.mlp.down.bias": "replicate",
    "head.*": "vocab",
}
