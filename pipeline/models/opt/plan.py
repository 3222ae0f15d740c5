"""Parallel plan of OPT: that of GPT; the projections of opt-350m at embedding and head are replicated."""

from __future__ import annotations

from pipeline.models.gpt import plan as gpt

PLAN: dict[str, str] = {**gpt.PLAN, "embed.project.weight": "replicate", "head.project.weight": "replicate"}
