"""Sizes of an OPT."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import Violation
from pipeline.knobs import knob
from pipeline.models.rules import MultiHead, heads_violations


@dataclass
class OPTConfig(MultiHead):
    """Learned positions that begin in row 2, LayerNorm, ReLU, tied embeddings, biases throughout."""

    family: str = knob("opt", "model family", choices=("opt",))
    layers: int = knob(12, "decoder blocks", at_least=1)
    hidden: int = knob(768, "width of the residual stream", at_least=1)
    heads: int = knob(12, "attention heads", at_least=1)
    ffn_hidden: int = knob(3072, "width inside the feed-forward", at_least=1)
    vocab_size: int = knob(50272, "rows of the embedding", unit="tokens", at_least=1)
    embed_width: int | None = knob(None, "width of the embedding and of the head, projected to hidden; null for hidden", at_least=1)
    max_positions: int = knob(2048, "longest sequence", unit="tokens", at_least=2)
    pre_norm: bool = knob(True, "norms before attention and feed-forward; false: after them, and none after the last block (opt-350m)")
    activation: str = knob("relu", "inside the feed-forward; Galactica's is gelu", choices=("relu", "gelu"))
    init_std: float = knob(0.006, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(True, "output head and token embedding are one matrix")

    @property
    def norm_eps(self) -> float:
        """Added to the variance in LayerNorm; the released models know no other."""
        return 1e-5

    @property
    def projected(self) -> bool:
        """Whether embedding and head have a width of their own."""
        return self.embed_width not in (None, self.hidden)

    @property
    def objective(self) -> str:
        """What it is trained to predict: the next token."""
        return "causal"

    def violations(self) -> list[Violation]:
        """Rules between the sizes that this configuration breaks."""
        return list(heads_violations(self.hidden, self.heads))
