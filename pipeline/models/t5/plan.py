"""How parallelism splits a T5 (roles: pipeline/models/plan.py)."""

from __future__ import annotations

PLAN: dict[str, str] = {
    "embed.tokens.weight": "vocab",
    "*coder_bias.weight": "column",
    "blocks.*_norm.weight": "replicate",
    "blocks.*.query.weight": "column",
    "blocks.*.key.weight": "column",
    "blocks.*.value.weight": "column",
    "blocks.*.output.weight": "row",
    "blocks.*.mlp.[gu]*.weight": "column",  # gate, in T5 1.1, and up
    "blocks.*.mlp.down.weight": "row",
    "norm.weight": "replicate",
    "head.weight": "vocab",
}

#: Positions are biases in every block, from one table for the encoder and one for the decoder.
EVERYWHERE = ("*coder_bias.weight",)
