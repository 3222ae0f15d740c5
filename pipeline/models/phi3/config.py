"""Configuration of Phi-3 and Phi-4."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob
from pipeline.models.mistral.config import MistralConfig


@dataclass(frozen=True)
class Phi3Config(MistralConfig):
    """Mistral's block under the names of Phi-3's class, whose files have its matrices joined."""

    family: str = knob("phi3", "model family", choices=("phi3",))
    layers: int = knob(40, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(5120, "width of the residual stream", at_least=1)
    heads: int = knob(40, "query heads", at_least=1)
    kv_heads: int = knob(10, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    ffn_hidden: int = knob(17920, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(100352, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(16384, "longest sequence", unit="tokens", at_least=2)
    window: int | None = knob(
        None, "sliding window of attention in tokens, including the current one; null for full attention", unit="tokens", at_least=1
    )
    rope_theta: float = knob(250000.0, "base of the rotary frequencies", above=0)
