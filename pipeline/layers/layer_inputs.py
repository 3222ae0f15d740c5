"""Embeddings of the tokens for every layer, which its block adds to the residual stream after a gate (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers import linear
from pipeline.layers.embedding import Embedding


class LayerInputs(nn.Module):
    """The inputs of all layers: the mean of a looked up and a computed vector of each, times sqrt(2).

    Args:
        vocab_size: number of token embeddings.
        hidden: width of the residual stream.
        layers: number of layers.
        width: width of the input of a layer.
        norm: factory of the norm of the computed vectors, given their width.
    """

    def __init__(self, vocab_size: int, hidden: int, layers: int, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.width = width
        self.embed = Embedding(vocab_size, layers * width, factor=width**0.5)
        self.project = linear.Linear(hidden, layers * width, bias=False)
        self.norm = norm(width)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Compute the inputs.

        Args:
            tokens: int64 (batch, sequence).
            hidden: the embeddings of the tokens, (batch, sequence, hidden).

        Returns:
            (batch, sequence, layers, width).
        """
        looked_up, computed = self.embed(tokens), self.project(hidden) * hidden.shape[-1] ** -0.5
        return (self.norm(computed.unflatten(-1, (-1, self.width))) + looked_up.unflatten(-1, (-1, self.width))) * 2**-0.5


class EmbeddingWithLayerInputs(Embedding):
    """Token embeddings, and the inputs of the layers. Arguments as in Embedding, and the module that computes them."""

    def __init__(self, vocab_size: int, hidden: int, *, factor: float, layer_inputs: LayerInputs) -> None:
        super().__init__(vocab_size, hidden, factor=factor)
        self.layer_inputs = layer_inputs

    def forward(self, tokens: Tensor, positions: Tensor | None = None, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override] # with the inputs of the layers
        """Return the output of Embedding, and (batch, sequence, layers, width)."""
        hidden = super().forward(tokens, positions, segments)
        return hidden, self.layer_inputs(tokens, hidden)


class LayerInput(nn.Module):
    """What a block adds to the residual stream x of its input p: norm(project(GELU(gate(x)) * p)).

    Args:
        hidden: width of the residual stream.
        width: width of the input.
        norm: factory of the norm, given the width hidden.
    """

    def __init__(self, hidden: int, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.gate = linear.Linear(hidden, width, bias=False)
        self.project = linear.Linear(width, hidden, bias=False)
        self.norm = norm(hidden)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """(batch, sequence, hidden) and (batch, sequence, width) -> (batch, sequence, hidden)."""
        output: Tensor = self.norm(self.project(F.gelu(self.gate(x), approximate="tanh") * inputs))
        return output
