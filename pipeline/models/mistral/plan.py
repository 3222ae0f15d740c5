"""How tensor parallelism splits a Mistral: it has the weights of a Llama."""

from __future__ import annotations

from pipeline.models.llama import plan as llama

PLAN: dict[str, str] = llama.PLAN
