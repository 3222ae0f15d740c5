"""The experts of a MoE layer: feed-forwards whose weights are stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pipeline.layers.expert_products import PRODUCTS, rows_of
from pipeline.layers.mlp import ACTIVATIONS, Gated


class RoutedExperts(nn.Module):
    """The experts of a MoE layer, on this rank or on several ranks."""

    def dispatch(self, x: Tensor, counts: Tensor) -> Callable[[], Tensor]:
        """Send the rows to their experts, arguments as in `Experts.forward`; the result returns their outputs."""
        raise NotImplementedError

    def dispatch_padded(self, parts: Sequence[Tensor], counts: Tensor | None = None) -> Callable[[], list[Tensor]]:
        """Send the same number of rows to each expert, without waiting for the device; the result returns their outputs.

        Args:
            parts: each (experts, rows, hidden); with counts (buffers, rows, hidden), the buffers of the ranks that have the experts.
            counts: int32 (parts, experts), rows of each expert, the first ones of its buffer; None if all rows are computed.
        """
        raise NotImplementedError


class Experts(RoutedExperts):
    """Feed-forward experts with weights stacked along dim 0. Their number is dim 0 of the weights, so slices work too.

    Args:
        hidden: width of the residual stream.
        ffn_hidden: intermediate width of each expert.
        activation: as in GatedMLP, or a function of the outputs of both projections, gate and up.
        gated: whether an expert has a gate; else the activation is that of MLP.
        bias: whether the matrices of each expert have a bias.

    Attributes:
        products: how the experts multiply; parallel/float8.py replaces it.
        down_ranks: number of tensor ranks with a slice of every expert, whose outputs are summed: each adds its share of the last bias.
    """

    gate: nn.Parameter | None
    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        experts: int,
        hidden: int,
        ffn_hidden: int,
        *,
        activation: str | Callable[[Tensor, Tensor], Tensor] = "silu",
        gated: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation: Callable[..., Tensor] = activation if callable(activation) else ACTIVATIONS[activation]
        if gated and isinstance(activation, str):
            self.activation = Gated(ACTIVATIONS[activation])
        self.products, self.down_ranks = PRODUCTS, 1
        self.register_parameter("gate", nn.Parameter(torch.empty(experts, ffn_hidden, hidden)) if gated else None)
        self.up = nn.Parameter(torch.empty(experts, ffn_hidden, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn_hidden))
        for matrix, width in (("gate", ffn_hidden), ("up", ffn_hidden), ("down", hidden)):
            self.register_parameter(
                f"{matrix}_bias", nn.Parameter(torch.empty(experts, width)) if bias and (gated or matrix != "gate") else None
            )

    def dispatch(self, x: Tensor, counts: Tensor) -> Callable[[], Tensor]:
        """See RoutedExperts."""
        return partial(self.forward, x, counts)

    def dispatch_padded(self, parts: Sequence[Tensor], counts: Tensor | None = None) -> Callable[[], list[Tensor]]:
        """See RoutedExperts."""
        assert counts is None, "experts of one rank have no buffers"
        return lambda: [self.forward_padded(part) for part in parts]

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows.

        Args:
            x: (rows, hidden), sorted by expert.
            counts: int64 (experts,), number of rows of each.

        Returns:
            (rows, hidden). Rows at the end that belong to no expert are undefined.
        """
        return self.outer(self.inner(x, counts), counts)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The matrices that the activation reads the outputs of."""
        return ("up",) if self.gate is None else ("gate", "up")

    def grouped(self, matrix: str, x: Tensor, counts: Tensor) -> Tensor:
        """Multiply the rows of each expert, (rows, input) as in forward, by its matrix `gate`, `up` or `down`: (rows, output)."""
        y, bias = self.products.grouped(x, getattr(self, matrix), counts), self._bias(matrix)
        return y if bias is None else y + rows_of(bias, counts, len(x))

    def batched(self, matrix: str, x: Tensor) -> Tensor:
        """As `grouped`, of as many rows for each expert: (experts, rows, input) -> (experts, rows, output)."""
        y, bias = self.products.batched(x, getattr(self, matrix)), self._bias(matrix)
        return y if bias is None else y + bias[:, None]

    def _bias(self, matrix: str) -> Tensor | None:
        """The bias of a matrix that this rank adds, (experts, output)."""
        bias: Tensor | None = getattr(self, f"{matrix}_bias")
        return bias if bias is None or matrix != "down" or self.down_ranks == 1 else bias / self.down_ranks

    def forward_padded(self, x: Tensor) -> Tensor:
        """Apply each expert to as many rows: (experts, rows, hidden) -> (experts, rows, hidden). Without biases, zeros remain zeros."""
        return self.outer(self.inner(x))

    def inner(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """The first half of forward, or without counts of forward_padded: (..., hidden) -> (..., ffn_hidden)."""
        return self.activation(*(self._multiply(matrix, x, counts) for matrix in self.inputs))

    def outer(self, inner: Tensor, counts: Tensor | None = None) -> Tensor:
        """The second half: (..., ffn_hidden) -> (..., hidden)."""
        return self._multiply("down", inner, counts)

    def _multiply(self, matrix: str, x: Tensor, counts: Tensor | None) -> Tensor:
        return self.batched(matrix, x) if counts is None else self.grouped(matrix, x, counts)
