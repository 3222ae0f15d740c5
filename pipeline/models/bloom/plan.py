"""How tensor parallelism splits a BLOOM: as a GPT, with a norm in the place of positions."""

from __future__ import annotations

from pipeline.models.gpt import plan as gpt

PLAN: dict[str, str] = {
    **{pattern: role for pattern, role in gpt.PLAN.items() if pattern != "embed.positions.weight"},
    "embed.norm.*": "replicate",
}
