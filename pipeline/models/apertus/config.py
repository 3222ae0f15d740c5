"""Configuration of Apertus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.common.knobs import knob
from pipeline.models import rope
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class ApertusConfig(RotaryDecoderConfig):
    """Llama's attention with norms of queries and keys, and a feed-forward layer with xIELU and without a gate."""

    #: Queries and keys have norms.
    query_key_norm: ClassVar[bool] = True

    family: str = knob("apertus", "model family", choices=("apertus",))
    kv_heads: int = knob(8, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    ffn_hidden: int = knob(21504, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(131072, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(65536, "longest sequence", unit="tokens", at_least=2)
    rope_theta: float = knob(12000000.0, "base of the rotary frequencies", above=1)
    rope_scaling: str = knob("llama3", "RoPE scaling for sequences longer than the original context length", choices=tuple(rope.KEYS))
    rope_factor: float = knob(8.0, "longest sequence over the original context length", at_least=1)
    rope_original_positions: int = knob(8192, "llama3, yarn: original context length", unit="tokens", at_least=1)
