"""Sizes of a GPT."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import Violation
from pipeline.knobs import knob


@dataclass
class GPTConfig:
    """Learned positions, pre-norm LayerNorm, GELU, tied embeddings, biases throughout."""

    family: str = knob("gpt", "model family", choices=("gpt",))
    layers: int = knob(12, "decoder blocks", at_least=1)
    hidden: int = knob(768, "width of the residual stream", at_least=1)
    heads: int = knob(12, "attention heads", at_least=1)
    ffn_hidden: int = knob(3072, "width inside the feed-forward", at_least=1)
    vocab_size: int = knob(50257, "rows of the embedding", unit="tokens", at_least=1)
    max_positions: int = knob(1024, "longest sequence", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(True, "output head and token embedding are one matrix")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads: as many as query heads."""
        return self.heads

    @property
    def objective(self) -> str:
        """What it is trained to predict: the next token."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Rules between the sizes that this configuration breaks."""
        if self.hidden % self.heads:
            return [Violation("model.heads", self.heads, f"must divide model.hidden={self.hidden}", "choose a divisor of model.hidden")]
        return []
