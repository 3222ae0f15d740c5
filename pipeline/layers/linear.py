"""Linear layers and embeddings whose weights wait for layers/init.py.

torch's own initial values would be overwritten, and drawing them on the meta device alone imports a second's worth of compiler.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """nn.Linear with uninitialised weights."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class Embedding(nn.Embedding):
    """nn.Embedding with uninitialised weights."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""
