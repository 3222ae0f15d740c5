"""Full weights of a model by name, as exports read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from pipeline.common.errors import UserError
from pipeline.models.stock_tensors import StockTensor


class Weights(Protocol):
    """Full weights by native name; a tied head has no entry."""

    def names(self) -> Iterable[str]:
        """Names of all weights."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""

    def tensor(self, name: str) -> Tensor:
        """Full value of a weight, fp32."""


class InMemory:
    """Weights in memory, or other tensors by the names of the weights."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @classmethod
    def of(cls, model: nn.Module) -> InMemory:
        """Return the weights of a model."""
        return cls({name: parameter.detach() for name, parameter in model.named_parameters()})

    def names(self) -> Iterable[str]:
        """See Weights."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """See Weights."""
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        """See Weights."""
        return self._tensors[name].clone()


def rounded(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a weight in the dtype of an export.

    Raises:
        UserError: a weight is too large for fp16.
    """
    value = weight.to(dtype)
    if dtype == torch.float16 and value.isinf().any() and not weight.isinf().any():
        rule = f"cannot hold {name}: it has values up to {float(weight.abs().max()):.3g}, and fp16 ends at 65504"
        raise UserError.of("stage.dtype", "fp16", rule, "set stage.dtype=bf16 or fp32")
    return value


class PartReader:
    """Reads the weights that a tensor of an export contains. A stack of experts is cached for the next tensor, which is another slice."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self._stacks: dict[str, Tensor] = {}

    def __call__(self, entry: StockTensor) -> list[Tensor]:
        """Return the weights of an entry, in the order of its names.

        Raises:
            UserError: a weight is too large for fp16.
        """
        if entry.expert is None:
            self._stacks = {}
            return [self._read(name) for name in entry.names]
        self._stacks = {name: stack for name, stack in self._stacks.items() if name in entry.names}  # freed before others are read
        self._stacks |= {name: self._read(name) for name in entry.names if name not in self._stacks}
        return [self._stacks[name] for name in entry.names]

    def _read(self, name: str) -> Tensor:
        return rounded(self._weights.tensor(name), self._dtype, name)
