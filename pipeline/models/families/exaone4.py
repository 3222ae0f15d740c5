"""EXAONE 4 (LG AI Research 2025, https://arxiv.org/abs/2507.11407): OLMo 2's norms of the outputs, and global layers without positions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models.config_json_keys import layer_types
from pipeline.models.decoder_mapping import OUTPUT_NORM_TABLE, decoder_mapping
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import KeyGroup, positive, refusal
from pipeline.models.shared_sizes import RotaryDecoderConfig, is_marked, window_violations


@dataclass(frozen=True)
class Exaone4Config(RotaryDecoderConfig, family="exaone4", kv_heads=8, vocab_size=102400, max_positions=65536, rope_theta=1e6):
    """Norms of the outputs of the layers, and of queries and keys; local layers with a window and, at an interval, global ones."""

    query_key_norm: ClassVar[bool] = True

    window: int | None = knob(
        4096,
        "sliding window of the local layers in tokens, with the current one; null for global layers only",
        unit="tokens",
        at_least=1,
    )
    sliding_window_pattern: int = knob(4, "the last of each of so many layers attends globally, the others within the window", at_least=1)

    def is_global(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has no window."""
        return is_marked(layer, self.sliding_window_pattern)

    def violations(self) -> list[Violation]:
        """See Sizes."""
        broken = [*super().violations(), *window_violations("model.window", self.window, self.max_positions)]
        if self.window is None and self.sliding_window_pattern > 1:
            rule = "has local layers, which model.window=null leaves without a window"
            broken.append(Violation("model.sliding_window_pattern", self.sliding_window_pattern, rule, "set it to 1, or set model.window"))
        return broken


def _build(config: Exaone4Config) -> Model:
    from pipeline.models.decoder import decoder

    def attention(layer: int) -> dict[str, Any]:
        if not config.is_global(layer):
            return {"window": config.window}
        # Beside local layers, global ones attend by content alone.
        return {"rope": "global" if config.window is None else "none"}

    return decoder(config, norms="after", query_key_norm="head", attention=attention)


_KINDS = layer_types(default=4, interval_key="sliding_window_pattern")


def _write(config: Exaone4Config) -> dict[str, Any]:
    return {"sliding_window": config.window, **_KINDS.write(config)}


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """Return the window, at most the longest sequence, and the interval: 1 without a window. A pattern may be text: LLLG means 4."""
    window, pattern = content.get("sliding_window", 4096), content.get("sliding_window_pattern", 4)
    if content.get("layer_types"):  # the class then reads no pattern
        pattern = 4
    elif isinstance(pattern, str):
        if not re.fullmatch("L*G", pattern):
            raise refusal("sliding_window_pattern", pattern, "must end with its only G, which this family requires")
        pattern = len(pattern)
    interval = 1 if window is None else positive("sliding_window_pattern", pattern)
    fields = _KINDS.read({**content, "sliding_window_pattern": interval})
    if window is not None:
        window = min(positive("sliding_window", window), content.get("max_position_embeddings") or 2048)
    return {"window": window, **fields}


MAPPING = decoder_mapping(
    "Exaone4ForCausalLM",
    "exaone4",
    defaults={"vocab_size": 102400, "num_key_value_heads": 32, "intermediate_size": 16384, "rms_norm_eps": 1e-5},
    nested=(KeyGroup(("sliding_window", *_KINDS.keys), _write, _read),),
    table=OUTPUT_NORM_TABLE,
)

# Initial weights: GPT-2's recipe; LG AI Research published none.
FAMILY = Family(config=Exaone4Config, build=_build, initial_std=scaled_residual, huggingface=(MAPPING,))
