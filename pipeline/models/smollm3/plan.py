"""Parallel plan of SmolLM3, which has the weights of Llama."""

from __future__ import annotations

from pipeline.models.llama import plan as llama

PLAN: dict[str, str] = llama.DENSE
