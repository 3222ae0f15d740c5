"""Linear layers and embeddings with uninitialized weights; parallel/parallelize.py initializes them.

The initial values of torch.nn would be overwritten, and drawing them on the meta device imports the compiler, which takes a second.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """nn.Linear with uninitialized weights."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class Embedding(nn.Embedding):
    """nn.Embedding with uninitialized weights."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""
