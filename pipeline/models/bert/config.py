"""Configuration of BERT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob


@dataclass(frozen=True)
class BertConfig:
    """Encoder with post-norm LayerNorm, exact GELU, learned position and segment embeddings, tied embeddings and biases."""

    family: str = knob("bert", "model family", choices=("bert",))
    layers: int = knob(12, "encoder blocks", at_least=1, at_most=2000)
    hidden: int = knob(768, "width of the residual stream", at_least=1)
    heads: int = knob(12, "attention heads", at_least=1)
    ffn_hidden: int = knob(3072, "intermediate width of the feed-forward", at_least=1)
    vocab_size: int = knob(30522, "number of token embeddings", unit="tokens", at_least=1)
    max_positions: int = knob(512, "longest sequence", unit="tokens", at_least=2)
    segments: int = knob(2, "number of segment embeddings", at_least=1)
    next_sentence: bool = knob(True, "add next-sentence prediction, trained on pairs of segments")
    labels: list[str] = knob([], "labels of sequence classification, set by stage=finetune; empty for a masked language model")
    norm_eps: float = knob(1e-12, "added to the variance in LayerNorm", above=0, at_most=0.1)
    init_std: float = knob(0.02, "standard deviation of initial weights", above=0)
    tie_embeddings: bool = knob(True, "tie the weights of output head and token embedding")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, equal to the number of query heads."""
        return self.heads

    @property
    def objective(self) -> str:
        """Training objective: masked-token prediction, or sequence classification."""
        return "classification" if self.labels else "masked"

    @property
    def is_classifier(self) -> bool:
        """Whether the head classifies sequences."""
        return bool(self.labels)

    def classifier(self, labels: Sequence[str]) -> Self:
        """Return the configuration of the encoder with a head for these labels."""
        return replace(self, labels=list(labels), next_sentence=False, tie_embeddings=False)

    @property
    def position_offset(self) -> int:
        """Row of the position embedding that holds position 0."""
        return 0

    @property
    def padding_token(self) -> int | None:
        """Token id that must not occur in text, since the Hugging Face class does not count its position; None for none."""
        return None

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        violations = []
        if self.hidden % self.heads:
            violations.append(
                Violation("model.heads", self.heads, f"must divide model.hidden={self.hidden}", "choose a divisor of model.hidden")
            )
        if self.labels and (self.next_sentence or self.tie_embeddings):
            fix = "leave it empty: stage=finetune training.objective=classification sets it"
            rule = "replaces the head of masked language modeling (model.next_sentence=false, model.tie_embeddings=false)"
            violations.append(Violation("model.labels", ", ".join(self.labels), rule, fix))
        if self.next_sentence and self.segments < 2:
            rule = "is too small for model.next_sentence, which needs two segments"
            violations.append(Violation("model.segments", self.segments, rule, "set it to 2, or model.next_sentence=false"))
        return violations
