"""Linear layers and embeddings with uninitialized weights; parallel/parallelize.py initializes them.

The initial values of torch.nn would be overwritten, and drawing them on the meta device imports the compiler, which takes a second.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.nf4 import NF4Weight


class Projection(Protocol):
    """Interface of `project`: several linear layers with the same input. Tensor parallelism replaces it."""

    def __call__(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        """(batch, sequence, hidden) -> the output of each layer."""
        ...


def project(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Apply linear layers to the same input; see Projection."""
    return [linear(x) for linear in linears]


class Linear(nn.Linear):
    """nn.Linear with uninitialized weights. The weight may be replaced by an NF4Weight, which is frozen (QLoRA).

    Attributes:
        joined: the rows of this weight and of those that follow it in memory, if layers with the same input are computed as one.
    """

    joined: Tensor | None = None

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., input) -> (..., output)."""
        weight: Tensor | NF4Weight = self.weight
        if isinstance(weight, Tensor):
            return F.linear(x, weight, self.bias)
        y: Tensor = weight(x)
        return y if self.bias is None else y + self.bias


class LookupTable(nn.Embedding):
    """nn.Embedding with uninitialized weights: the rows of a vocabulary."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""
