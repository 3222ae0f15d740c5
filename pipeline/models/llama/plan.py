"""How tensor parallelism splits a Llama (roles: pipeline/models/plan.py)."""

from __future__ import annotations

PLAN: dict[str, str] = {
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
