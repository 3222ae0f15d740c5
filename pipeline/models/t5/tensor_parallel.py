"""Tensor-parallel table of T5 (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

TENSOR_PARALLEL: dict[str, str] = {
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

#: All blocks of the encoder share one table of position biases, and all blocks of the decoder another; every pipeline stage holds them.
ON_EVERY_STAGE = ("*coder_bias.weight",)
