"""What every model configuration has, as a type. The dataclasses are in the families' config.py; families.py lists them."""

from __future__ import annotations

from dataclasses import Field
from typing import Any, ClassVar, Protocol

from pipeline.common.errors import Violation


class ModelConfig(Protocol):
    """A dataclass of a model's sizes. Each member is a field or a property."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def family(self) -> str:
        """Name of the model family."""

    @property
    def objective(self) -> str:
        """Name of the training objective (data/load/objectives/registry.py)."""

    @property
    def layers(self) -> int:
        """Number of blocks."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""

    @property
    def heads(self) -> int:
        """Number of query heads."""

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""

    @property
    def head_dim(self) -> int:
        """Width of the queries and keys of a head."""

    @property
    def ffn_hidden(self) -> int:
        """Inner width of the (dense) feed-forward layers."""

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding."""

    @property
    def max_positions(self) -> int:
        """Longest sequence, tokens."""

    @property
    def tie_embeddings(self) -> bool:
        """Whether the output matrix is the token embedding."""

    def violations(self) -> list[Violation]:
        """The rules between these sizes that the configuration breaks."""


class MaskedModelConfig(ModelConfig, Protocol):
    """A model that is trained by masked language modeling."""

    @property
    def next_sentence(self) -> bool:
        """Whether the model is also trained by next-sentence prediction."""

    @property
    def padding_token(self) -> int | None:
        """The token id that the stock class treats as padding; None if it has none."""
