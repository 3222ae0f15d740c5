"""SmolLM3 (Hugging Face 2025, https://huggingface.co/blog/smollm3): Llama's block, in some layers without positions.

Layers without position embeddings (NoPE, Yang et al. 2025, https://arxiv.org/abs/2501.18795) attend by content alone, at any distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models.config_json_keys import ROPE, interval_of, with_theta
from pipeline.models.decoder_mapping import FULL_ATTENTION, NO_PADDING, decoder_mapping, key_value_heads
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import KeyGroup, refusal
from pipeline.models.shared_sizes import RotaryDecoderConfig, is_marked, marked


@dataclass(frozen=True)
class SmolLM3Config(
    RotaryDecoderConfig, family="smollm3", kv_heads=8, vocab_size=128256, norm_eps=1e-6, rope_theta=2000000.0, tie_embeddings=True
):
    """Llama's block; one layer of each interval has no position embeddings."""

    no_rope_layer_interval: int = knob(4, "the last of each of so many layers has no rotary position embeddings", at_least=1)


def _build(config: SmolLM3Config) -> Model:
    from pipeline.models.decoder import decoder

    return decoder(config, attention=lambda layer: {"rope": "none" if is_marked(layer, config.no_rope_layer_interval) else "global"})


def _write(config: SmolLM3Config) -> dict[str, Any]:
    """Return the interval, and 1 for each layer with positions, else 0."""
    interval = config.no_rope_layer_interval
    return {"no_rope_layer_interval": interval, "no_rope_layers": [int(not without) for without in marked(config.layers, interval)]}


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """Return no_rope_layer_interval; the list takes precedence, as in the class."""
    interval, layers = content.get("no_rope_layer_interval", 4), content.get("no_rope_layers")
    count = content.get("num_hidden_layers", 36)
    if layers is not None and not isinstance(layers, list):
        raise refusal("no_rope_layers", layers, "must be a list", "fix config.json")
    return {"no_rope_layer_interval": interval if layers is None else interval_of("no_rope_layers", layers[:count], 0, interval)}


MAPPING = decoder_mapping(
    "SmolLM3ForCausalLM",
    "smollm3",
    constants={"attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
    defaults={
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": key_value_heads(4, 16),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    rope=with_theta(ROPE, 2000000.0),
    nested=(NO_PADDING, FULL_ATTENTION, KeyGroup(("no_rope_layers", "no_rope_layer_interval"), _write, _read)),
    ignored_keys=("sliding_window",),  # windows are off (use_sliding_window), whatever the width is
)

# Initial weights: GPT-2's recipe.
FAMILY = Family(config=SmolLM3Config, build=_build, initial_std=scaled_residual, huggingface=(MAPPING,))
