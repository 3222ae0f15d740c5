"""Sizes of a GPT."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import Violation
from pipeline.knobs import knob
from pipeline.models.rules import MultiHead, heads_violations, window_violations


@dataclass
class GPTConfig(MultiHead):
    """Learned positions, pre-norm LayerNorm, GELU, tied embeddings, biases throughout."""

    family: str = knob("gpt", "model family", choices=("gpt",))
    layers: int = knob(12, "decoder blocks", at_least=1)
    hidden: int = knob(768, "width of the residual stream", at_least=1)
    heads: int = knob(12, "attention heads", at_least=1)
    ffn_hidden: int = knob(3072, "width inside the feed-forward", at_least=1)
    vocab_size: int = knob(50257, "rows of the embedding", unit="tokens", at_least=1)
    max_positions: int = knob(1024, "longest sequence", unit="tokens", at_least=2)
    banded_window: int | None = knob(
        None, "tokens that every second layer sees (GPT-3), itself and those before it; null for all", unit="tokens", at_least=1
    )
    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(True, "output head and token embedding are one matrix")

    @property
    def objective(self) -> str:
        """What it is trained to predict: the next token."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Rules between the sizes that this configuration breaks."""
        return [
            *heads_violations(self.hidden, self.heads),
            *window_violations("model.banded_window", self.banded_window, self.max_positions),
        ]
