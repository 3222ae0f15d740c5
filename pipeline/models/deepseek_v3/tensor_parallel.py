"""Tensor-parallel table of DeepSeek-V3 (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

from typing import Any

#: Every tensor rank computes the full latents and projects them up to its own heads.
ATTENTION: dict[str, str] = {
    "attention.query_down.weight": "partial",
    "attention.query_norm.weight": "partial",
    "attention.query_up.weight": "column",
    "attention.key_value_down.weight": "partial",
    "attention.key_value_norm.weight": "partial",
    "attention.key_value_up.weight": "column",
    "attention.output.weight": "row",
}
#: A block with experts, without the attention.
BLOCK: dict[str, str] = {
    "attention_norm.weight": "replicate",
    "mlp_norm.weight": "replicate",
    "mlp.routed.router.weight": "partial",
    "mlp.routed.router.bias": "replicate",
    "mlp.routed.experts.gate": "expert_column",
    "mlp.routed.experts.up": "expert_column",
    "mlp.routed.experts.down": "expert_row",
    "mlp.shared.gate.weight": "column",
    "mlp.shared.up.weight": "column",
    "mlp.shared.down.weight": "row",
}


def table(attention: dict[str, str]) -> dict[str, str]:
    """Return the table of a model with MoE layers and MTP modules, given the roles of the weights of its attention."""
    block = {**attention, **BLOCK}
    return {
        "embed.tokens.weight": "vocab",
        **{f"blocks.*.{name}": role for name, role in block.items()},
        "blocks.*.mlp.gate.weight": "column",
        "blocks.*.mlp.up.weight": "column",
        "blocks.*.mlp.down.weight": "row",
        "norm.weight": "replicate",
        "head.output.weight": "vocab",
        "head.depths.*.token_norm.weight": "replicate",
        "head.depths.*.hidden_norm.weight": "replicate",
        "head.depths.*.project.weight": "replicate",
        **{f"head.depths.*.block.{name}": role for name, role in block.items()},
        "head.depths.*.final_norm.weight": "replicate",
    }


TENSOR_PARALLEL = table(ATTENTION)


def tied_weights(config: Any) -> dict[str, str]:
    """Return the tied weights: with MTP modules, the head also holds the embedding."""
    copies = ["head.embed.tokens.weight"] if config.mtp_depth else []
    return dict.fromkeys(copies + (["head.output.weight"] if config.tie_embeddings else []), "embed.tokens.weight")
