"""Configuration of OLMo 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.common.knobs import knob
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class Olmo2Config(RotaryDecoderConfig):
    """Llama's layers with norms of their outputs instead of their inputs, and RMSNorm over the full width of queries and keys."""

    #: Queries and keys have norms.
    query_key_norm: ClassVar[bool] = True

    family: str = knob("olmo2", "model family", choices=("olmo2",))
    vocab_size: int = knob(100352, "number of token embeddings", unit="tokens", at_least=1)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    rope_theta: float = knob(500000.0, "base of the rotary frequencies", above=1)
