"""How tensor parallelism splits a GPT-1: as a GPT, which has a norm after the last block on top."""

from __future__ import annotations

from pipeline.models.gpt import plan as gpt

PLAN: dict[str, str] = {pattern: role for pattern, role in gpt.PLAN.items() if pattern != "norm.*"}
