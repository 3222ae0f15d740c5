"""Tensor-parallel table of Mixtral (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

TENSOR_PARALLEL: dict[str, str] = {
    "embed.tokens.weight": "vocab",
    "blocks.*.attention_norm.weight": "replicate",
    "blocks.*.attention.query.weight": "column",
    "blocks.*.attention.key.weight": "column",
    "blocks.*.attention.value.weight": "column",
    "blocks.*.attention.output.weight": "row",
    "blocks.*.mlp_norm.weight": "replicate",
    "blocks.*.mlp.router.weight": "partial",
    "blocks.*.mlp.experts.gate": "expert_column",
    "blocks.*.mlp.experts.up": "expert_column",
    "blocks.*.mlp.experts.down": "expert_row",
    "norm.weight": "replicate",
    "head.weight": "vocab",
}
