"""Tensor-parallel table of Llama (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

#: without norms of queries and keys, and without biases
DENSE: dict[str, str] = {
    "embed.tokens.weight": "vocab",
    "blocks.*.attention_norm.weight": "replicate",
    "blocks.*.attention.query.weight": "column",
    "blocks.*.attention.key.weight": "column",
    "blocks.*.attention.value.weight": "column",
    "blocks.*.attention.output.weight": "row",
    "blocks.*.mlp_norm.weight": "replicate",
    "blocks.*.mlp.gate.weight": "column",
    "blocks.*.mlp.up.weight": "column",
    "blocks.*.mlp.down.weight": "row",
    "norm.weight": "replicate",
    "head.weight": "vocab",
}
TENSOR_PARALLEL: dict[str, str] = {
    **DENSE,
    "blocks.*.attention.query.bias": "column",
    "blocks.*.attention.key.bias": "column",
    "blocks.*.attention.value.bias": "column",
    "blocks.*.attention.output.bias": "replicate",
    # replicated, but applied to each rank's own heads
    "blocks.*.attention.query_norm.weight": "partial",
    "blocks.*.attention.key_norm.weight": "partial",
}
