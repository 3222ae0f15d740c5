"""Tensor-parallel table of BERT (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

TENSOR_PARALLEL: dict[str, str] = {
    "embed.tokens.weight": "vocab",
    "embed.positions.weight": "replicate",
    "embed.segments.weight": "replicate",
    "embed.norm.*": "replicate",
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
    "head.dense.*": "replicate",
    "head.norm.*": "replicate",
    "head.output.*": "vocab",
    "head.sentence.*": "partial",
}
