"""Configuration of Granite 3."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class GraniteConfig(RotaryDecoderConfig):
    """Llama's block with a factor of the embedding, of the attention scores, of the output of each layer, and of the logits."""

    family: str = knob("granite", "model family", choices=("granite",))
    embedding_multiplier: float = knob(12.0, "factor of the token embeddings", above=0)
    attention_multiplier: float = knob(0.0078125, "factor of the attention scores, in place of 1 / sqrt(width of a head)", above=0)
    residual_multiplier: float = knob(0.22, "factor of the output of each layer, before it is added to the residual stream", above=0)
    logits_scaling: float = knob(16.0, "divisor of the logits", above=0)
    layers: int = knob(40, "decoder blocks", at_least=1, at_most=2000)
    kv_heads: int = knob(8, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    ffn_hidden: int = knob(12800, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(49155, "number of token embeddings", unit="tokens", at_least=1)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")
