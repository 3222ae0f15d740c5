"""Linear layers and embeddings with uninitialized weights; parallel/parallelize.py initializes them.

The initial values of torch.nn would be overwritten, and drawing them on the meta device imports the compiler, which takes a second.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


class Projection(Protocol):
    """Interface of `project`: several linear layers with the same input. Tensor parallelism replaces it."""

    def __call__(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        """(batch, sequence, hidden) -> the output of each layer."""
        ...


def project(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Apply linear layers to the same input; see Projection."""
    return [linear(x) for linear in linears]


class Linear(nn.Linear):
    """nn.Linear with uninitialized weights."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class Embedding(nn.Embedding):
    """nn.Embedding with uninitialized weights."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""
