"""Gemma 2 (Gemma Team 2024, https://arxiv.org/abs/2408.00118): every second layer attends locally; scores and logits are bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.common.knobs import knob
from pipeline.layers.recipes import offset_norms
from pipeline.models.config_json_keys import layer_types
from pipeline.models.decoder_mapping import NO_PADDING, decoder_mapping
from pipeline.models.families import gemma3
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import KeyGroup, refusal


@dataclass(frozen=True)
class Gemma2Config(gemma3.GemmaConfig, family="gemma2", hidden=2304, heads=8, kv_heads=4, ffn_hidden=9216, vocab_size=256000):
    """Local layers with a sliding window and, at an interval, global ones; soft caps of scores and logits; else Gemma 3's block."""

    attn_logit_softcapping: float | None = knob(50.0, "bound c of the attention scores s: c tanh(s / c); null for none", above=0)
    final_logit_softcapping: float | None = knob(30.0, "the same bound of the logits; null for none", above=0)


def _build(config: Gemma2Config) -> Model:
    return gemma3.gemma(
        config,
        attention=lambda layer: {"window": config.local_window(layer), "scale": config.score_factor},
        head={"softcap": config.final_logit_softcapping},
        softcap=config.attn_logit_softcapping,
    )


def _read_direction(content: dict[str, Any]) -> dict[str, Any]:
    """Verify that attention is causal."""
    if content.get("use_bidirectional_attention"):
        raise refusal("use_bidirectional_attention", content["use_bidirectional_attention"], "is not supported by this family")
    return {}


_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

MAPPING = decoder_mapping(
    "Gemma2ForCausalLM",
    "gemma2",
    keys={**gemma3.KEYS, **{key: (key, bound) for key, bound in _CAPS.items()}},
    activation={"hidden_activation": "gelu_pytorch_tanh"},
    constants={"attention_bias": False},
    defaults={**gemma3.DEFAULTS, "vocab_size": 256000, "max_position_embeddings": 8192},
    head_width=None,
    nested=(
        *(gemma3.HEAD_DIM, NO_PADDING, layer_types(default=2)),
        KeyGroup(("use_bidirectional_attention",), lambda _: {}, _read_direction),
    ),
    table=gemma3.gemma_table(),
)

# Initial weights: as Gemma 3.
FAMILY = Family(config=Gemma2Config, build=_build, initial_std=offset_norms, huggingface=(MAPPING,))
