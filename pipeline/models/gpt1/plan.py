"""Parallel plan of GPT-1: that of GPT without the final norm."""

from __future__ import annotations

from pipeline.models.gpt import plan as gpt

PLAN: dict[str, str] = {pattern: role for pattern, role in gpt.PLAN.items() if pattern != "norm.*"}
