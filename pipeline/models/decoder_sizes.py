"""Sizes that the dense decoders with rotary position embeddings share. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models import rope
from pipeline.models.rules import rotary_heads_violations


@dataclass(frozen=True)
class RotaryDecoderConfig(rope.RopeConfig):
    """Fields of a decoder with rotary position embeddings, RMSNorm and grouped-query attention. Families add theirs."""

    layers: int = knob(32, "decoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(4096, "width of the residual stream", at_least=1)
    heads: int = knob(32, "query heads", at_least=1)
    kv_heads: int = knob(32, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    head_width: int | None = knob(None, "width of a head; hidden/heads when null", at_least=2)
    ffn_hidden: int = knob(11008, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(32000, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(4096, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-5, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(False, "tie the weights of output head and token embedding")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.head_width or self.hidden // self.heads

    @property
    def objective(self) -> str:
        """Training objective: next-token prediction."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        return [*rotary_heads_violations(self.hidden, self.heads, self.kv_heads, self.head_width), *rope.violations(self)]
