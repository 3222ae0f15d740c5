"""Mistral (Jiang et al. 2023, https://arxiv.org/abs/2310.06825): with a sliding window in each layer, n layers reach n windows back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models.config_json_keys import UNSCALED
from pipeline.models.decoder_mapping import decoder_mapping
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import KeyGroup, positive
from pipeline.models.shared_sizes import WideHeadConfig, window_violations

WINDOW = "sliding window of attention in tokens, including the current one; null for full attention"


@dataclass(frozen=True)
class MistralConfig(WideHeadConfig, family="mistral", kv_heads=8, ffn_hidden=14336, max_positions=32768):
    """Llama's block with a sliding window and a configurable head width."""

    window: int | None = knob(4096, WINDOW, unit="tokens", at_least=1)
    rope_theta: float = knob(10000.0, "base of the rotary frequencies", above=0)

    def violations(self) -> list[Violation]:
        """See Sizes."""
        return [*super().violations(), *window_violations("model.window", self.window, self.max_positions)]


def _build(config: MistralConfig) -> Model:
    from pipeline.models.decoder import decoder

    return decoder(config, attention=lambda _: {"window": config.window})


#: default of max_position_embeddings in Mistral's and Mixtral's classes
MAX_POSITIONS = 4096 * 32


def window(*, default: int | None) -> KeyGroup:
    """Return the key of the sliding window; a window that no sequence exceeds is full attention."""

    def read(content: dict[str, Any]) -> dict[str, Any]:
        width = content.get("sliding_window", default)
        positions = content.get("max_position_embeddings", MAX_POSITIONS)
        return {"window": None if width is None or positive("sliding_window", width) > positions else width}

    return KeyGroup(("sliding_window",), lambda config: {"sliding_window": config.window}, read)


def kv_heads(content: dict[str, Any]) -> int:
    """Return the default of num_key_value_heads in both classes."""
    return content.get("num_key_value_heads", 8) or content.get("num_attention_heads", 32)


MAPPING = decoder_mapping(
    "MistralForCausalLM",
    "mistral",
    defaults={"max_position_embeddings": MAX_POSITIONS, "num_key_value_heads": kv_heads, "intermediate_size": 14336},
    rope=UNSCALED,
    nested=(window(default=4096),),
)

# Initial weights: GPT-2's recipe; Mistral AI published none.
FAMILY = Family(config=MistralConfig, build=_build, initial_std=scaled_residual, huggingface=(MAPPING,))
