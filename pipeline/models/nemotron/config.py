"""Configuration of Nemotron-4."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.rules import partial_rotary_violations
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class NemotronConfig(RotaryDecoderConfig):
    """LayerNorm, squared ReLU without a gate, rotary positions of a part of the dims of a head, grouped-query attention."""

    family: str = knob("nemotron", "model family", choices=("nemotron",))
    layers: int = knob(32, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(6144, "width of the residual stream", at_least=1)
    heads: int = knob(48, "query heads", at_least=1)
    kv_heads: int = knob(8, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    ffn_hidden: int = knob(24576, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(256000, "number of token embeddings", unit="tokens", at_least=1)
    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0, at_most=0.1)
    partial_rotary_factor: float = knob(0.5, "share of the dims of a head that are rotated, the first ones", above=0, at_most=1)
    init_std: float = knob(0.0134, "standard deviation of initial weights", above=0)

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        found = super().violations()
        return found or [*partial_rotary_violations(self.head_dim, self.partial_rotary_factor)]
