"""Configuration of RoBERTa, XLM-R and CamemBERT."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.bert.config import BertConfig

#: model_type of config.json; the classes compute the same function of weights with the same names.
MODEL_TYPES = ("roberta", "xlm-roberta", "camembert")
#: Padding token id of the Hugging Face class; position 0 is in row PADDING + 1 of its position embedding.
PADDING = 1


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """BERT's encoder (Liu et al. 2019, https://arxiv.org/abs/1907.11692) with one segment, without next-sentence prediction."""

    family: str = knob("roberta", "model family", choices=("roberta",))
    model_type: str = knob("roberta", "Hugging Face type and class of the export: RoBERTa, XLM-R or CamemBERT", choices=MODEL_TYPES)
    vocab_size: int = knob(50265, "number of token embeddings", unit="tokens", at_least=1)
    segments: int = knob(1, "number of segment embeddings", at_least=1)
    next_sentence: bool = knob(False, "must stay false: RoBERTa has no next-sentence prediction")
    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0, at_most=0.1)

    @property
    def position_offset(self) -> int:
        """Row of the position embedding that holds position 0."""
        return PADDING + 1

    @property
    def padding_token(self) -> int | None:
        """Token id that must not occur in text, since the Hugging Face class does not count its position."""
        return PADDING

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        if self.next_sentence:
            return [
                Violation(
                    "model.next_sentence",
                    True,
                    "is supported by BERT only; RoBERTa has no next-sentence head",
                    "leave it out, or choose a BERT",
                )
            ]
        return super().violations()
