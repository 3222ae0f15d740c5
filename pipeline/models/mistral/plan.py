"""How tensor parallelism splits a Mistral: it has a Llama's weights."""

from __future__ import annotations

from pipeline.models.llama import plan as llama

PLAN: dict[str, str] = llama.DENSE
