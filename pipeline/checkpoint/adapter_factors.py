"""The values of a LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """The adapter of a linear layer: b @ a * alpha / rank is added to its weight; a is (rank, input), b (output, rank), both fp32."""

    a: Tensor
    b: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """Rows of a."""
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model.

    Attributes:
        layers: name of a linear layer -> its factors.
        base: base_hash of the weights that it was trained with; empty if that is not known.
        path: where it was read from.
        saved: name of a weight that was trained beside the adapter (lora.modules_to_save) -> its full value.
    """

    layers: Mapping[str, Factors]
    base: str
    path: Path
    saved: Mapping[str, Tensor] = field(default_factory=dict)
