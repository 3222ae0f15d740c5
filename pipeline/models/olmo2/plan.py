"""Parallel plan of OLMo 2 (roles: pipeline/models/plan.py)."""

from __future__ import annotations

from pipeline.models.llama import plan as llama

PLAN: dict[str, str] = {
    **{name: role for name, role in llama.DENSE.items() if not name.startswith(("blocks.*.attention_norm", "blocks.*.mlp_norm"))},
    # over the heads of all ranks
    "blocks.*.attention.query_norm.weight": "column",
    "blocks.*.attention.key_norm.weight": "column",
    "blocks.*.post_attention_norm.weight": "replicate",
    "blocks.*.post_mlp_norm.weight": "replicate",
}
