"""How tensor parallelism splits an OPT: as a GPT; opt-350m's projections beside embedding and head are every rank's."""

from __future__ import annotations

from pipeline.models.gpt import plan as gpt

PLAN: dict[str, str] = {**gpt.PLAN, "embed.project.weight": "replicate", "head.project.weight": "replicate"}
