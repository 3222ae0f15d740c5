"""What every model configuration has: as a type, and as the base of the families' dataclasses."""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Protocol

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob


@dataclass(frozen=True)
class Sizes:
    """Base of the configurations. Class arguments are other defaults of inherited fields, whose meaning and legal range stay.

    class Olmo2Config(RotaryDecoderConfig, family="olmo2", vocab_size=100352) has all fields of RotaryDecoderConfig.
    """

    family: str = knob("", "model family")

    def __init_subclass__(cls, **defaults: Any) -> None:
        """Declare the fields of the class arguments, before the decorator of the dataclass reads them."""
        inherited: dict[str, Field[Any]] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited.update(getattr(base, "__dataclass_fields__", {}))
        for name, default in defaults.items():
            metadata = knob(default, "model family", choices=(default,)).metadata if name == "family" else inherited[name].metadata
            cls.__annotations__[name] = inherited[name].type
            setattr(cls, name, field(default=default, metadata=metadata))

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates; each class has those of its fields, and adds the next one's."""
        return []


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
