"""Configuration of SmolLM3."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class SmolLM3Config(RotaryDecoderConfig):
    """Llama's block; one layer of each interval has no position embeddings."""

    family: str = knob("smollm3", "model family", choices=("smollm3",))
    no_rope_layer_interval: int = knob(4, "the last of each of so many layers has no rotary position embeddings", at_least=1)
    kv_heads: int = knob(8, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    vocab_size: int = knob(128256, "number of token embeddings", unit="tokens", at_least=1)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    rope_theta: float = knob(2000000.0, "base of the rotary frequencies", above=1)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")
