"""Parallel plan of RoBERTa: that of BERT, whose next-sentence head is its head of sequence classification."""

from __future__ import annotations

from pipeline.models.bert import plan

PLAN: dict[str, str] = plan.PLAN

ALIASES = plan.ALIASES
