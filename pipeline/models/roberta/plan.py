"""Parallel plan of RoBERTa: that of BERT without the next-sentence head."""

from __future__ import annotations

from pipeline.models.bert import plan

PLAN: dict[str, str] = {name: role for name, role in plan.PLAN.items() if not name.startswith("head.sentence")}

ALIASES = plan.ALIASES
