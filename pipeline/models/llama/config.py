"""Sizes of a Llama."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import Violation
from pipeline.knobs import knob
from pipeline.models.rules import groups_violations, heads_violations


@dataclass
class LlamaConfig:
    """RMSNorm, SwiGLU, rotary positions, grouped-query attention, no biases."""

    family: str = knob("llama", "model family", choices=("llama",))
    layers: int = knob(32, "decoder blocks", at_least=1)
    hidden: int = knob(4096, "width of the residual stream", at_least=1)
    heads: int = knob(32, "query heads", at_least=1)
    kv_heads: int = knob(32, "key and value heads, shared by heads/kv_heads query heads each", at_least=1)
    ffn_hidden: int = knob(11008, "width inside the feed-forward", at_least=1)
    vocab_size: int = knob(32000, "rows of the embedding", unit="tokens", at_least=1)
    max_positions: int = knob(4096, "longest sequence", unit="tokens", at_least=2)
    rope_theta: float = knob(10000.0, "base of the rotary wave lengths", above=0)
    norm_eps: float = knob(1e-5, "added to the mean square in RMSNorm", above=0)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(False, "output head and token embedding are one matrix")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def objective(self) -> str:
        """What it is trained to predict: the next token."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Rules between the sizes that this configuration breaks."""
        found = [*heads_violations(self.hidden, self.heads), *groups_violations(self.heads, self.kv_heads)]
        if self.hidden % self.heads == 0 and self.head_dim % 2:
            rule = f"gives odd head width {self.head_dim}; rotary turns pairs"
            found.append(Violation("model.heads", self.heads, rule, "choose heads so that hidden/heads is even"))
        return found
