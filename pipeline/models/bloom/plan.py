"""Parallel plan of BLOOM: that of GPT, with a norm instead of position embeddings."""

from __future__ import annotations

from pipeline.models.gpt import plan as gpt

PLAN: dict[str, str] = {
    **{pattern: role for pattern, role in gpt.PLAN.items() if pattern != "embed.positions.weight"},
    "embed.norm.*": "replicate",
}
