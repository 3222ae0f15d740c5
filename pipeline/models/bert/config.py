"""Sizes of a BERT."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import Violation
from pipeline.knobs import knob


@dataclass
class BertConfig:
    """An encoder with post-norm LayerNorm, exact GELU, learned positions and segments, tied embeddings, biases throughout."""

    family: str = knob("bert", "model family", choices=("bert",))
    layers: int = knob(12, "encoder blocks", at_least=1)
    hidden: int = knob(768, "width of the residual stream", at_least=1)
    heads: int = knob(12, "attention heads", at_least=1)
    ffn_hidden: int = knob(3072, "width inside the feed-forward", at_least=1)
    vocab_size: int = knob(30522, "rows of the embedding", unit="tokens", at_least=1)
    max_positions: int = knob(512, "longest sequence", unit="tokens", at_least=2)
    segments: int = knob(2, "rows of the segment embedding", at_least=1)
    next_sentence: bool = knob(True, "train next-sentence prediction too, on pairs of segments")
    norm_eps: float = knob(1e-12, "added to the variance in LayerNorm", above=0)
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
        """What it is trained to predict: masked tokens."""
        return "masked"

    @property
    def position_offset(self) -> int:
        """Rows of the table of positions before that of position 0."""
        return 0

    @property
    def padding_token(self) -> int | None:
        """The token id that no text may hold, as the stock class would skip its position; None for none."""
        return None

    def violations(self) -> list[Violation]:
        """Rules between the sizes that this configuration breaks."""
        found = []
        if self.hidden % self.heads:
            found.append(
                Violation("model.heads", self.heads, f"must divide model.hidden={self.hidden}", "choose a divisor of model.hidden")
            )
        if self.next_sentence and self.segments < 2:
            rule = "leaves no second segment for model.next_sentence"
            found.append(Violation("model.segments", self.segments, rule, "set it to 2, or model.next_sentence=false"))
        return found
