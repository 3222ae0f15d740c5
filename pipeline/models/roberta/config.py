"""Sizes of a RoBERTa."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import Violation
from pipeline.knobs import knob
from pipeline.models.bert.config import BertConfig

#: The token that the stock class takes for padding: the rows of its positions are counted from the one after it.
PADDING = 1


@dataclass
class RobertaConfig(BertConfig):
    """BERT's encoder (Liu et al. 2019, https://arxiv.org/abs/1907.11692) with one segment, no next sentence, and two unused positions."""

    family: str = knob("roberta", "model family", choices=("roberta",))
    vocab_size: int = knob(50265, "rows of the embedding", unit="tokens", at_least=1)
    segments: int = knob(1, "rows of the segment embedding", at_least=1)
    next_sentence: bool = knob(False, "must stay false: RoBERTa has no next-sentence prediction")
    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0)

    @property
    def position_offset(self) -> int:
        """Rows of the table of positions before that of position 0."""
        return PADDING + 1

    @property
    def padding_token(self) -> int | None:
        """The token id that no text may hold, as the stock class would skip its position."""
        return PADDING

    def violations(self) -> list[Violation]:
        """Rules between the sizes that this configuration breaks."""
        if self.next_sentence:
            return [Violation("model.next_sentence", True, "is BERT's; RoBERTa has no head for it", "leave it out, or choose a BERT")]
        return super().violations()
