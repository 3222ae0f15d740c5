"""LoRA (Hu et al. 2022, https://arxiv.org/abs/2106.09685): a linear layer plus a trained product of two matrices of low rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.linear import Linear


@dataclass(frozen=True)
class LoraSpec:
    """The adapter of one linear layer; its output is scaled by alpha / rank."""

    rank: int
    alpha: float
    dropout: float = 0.0


class LowRank(nn.Module):
    """The adapter: b(a(dropout(x))) * alpha / rank. Slices of `a` along its inputs and of `b` along its outputs work, too.

    Attributes:
        input_slices, input_slice: number of equal slices of the full input's columns, and the index of the one that is passed. Dropout
            drops the same elements of it as of the full input.
    """

    def __init__(self, in_features: int, out_features: int, spec: LoraSpec) -> None:
        super().__init__()
        self.scale, self.dropout, self.enabled = spec.alpha / spec.rank, spec.dropout, True
        self.input_slices, self.input_slice = 1, 0
        self.a = nn.Parameter(torch.empty(spec.rank, in_features))
        self.b = nn.Parameter(torch.empty(out_features, spec.rank))

    def forward(self, x: Tensor) -> Tensor:
        """(..., input) -> (..., output)."""
        if self.dropout and self.training:
            x = self._drop(x)
        return F.linear(F.linear(x, self.a), self.b) * self.scale

    def _drop(self, x: Tensor) -> Tensor:
        """Apply dropout to a slice of the input, with the random numbers of the full input."""
        if self.input_slices == 1:
            return F.dropout(x, self.dropout)
        factors = F.dropout(x.new_ones(*x.shape[:-1], x.shape[-1] * self.input_slices), self.dropout)
        dropped = factors.chunk(self.input_slices, dim=-1)[self.input_slice] == 0  # autograd saves one byte for each element of the slice
        return x.masked_fill(dropped, 0.0) * (1 / (1 - self.dropout))


class LoRALinear(Linear):
    """A linear layer with an adapter. The weights of the layer keep their names; those of the adapter are `lora.a` and `lora.b`."""

    def __init__(self, base: nn.Linear, spec: LoraSpec) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.lora = LowRank(base.in_features, base.out_features, spec)

    def forward(self, x: Tensor) -> Tensor:
        """(..., input) -> (..., output)."""
        return super().forward(x) + self.lora(x) if self.lora.enabled else super().forward(x)


def add_adapters(model: nn.Module, spec_of: Callable[[str], LoraSpec | None]) -> None:
    """Replace linear layers of a model by layers with an adapter.

    Args:
        model: the full model.
        spec_of: name of a linear layer -> its adapter, None for none.
    """
    for name, layer in linear_layers(model):
        if (spec := spec_of(name)) is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, LoRALinear(layer, spec))


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Iterate over the linear layers that may have an adapter, with their names."""
    return ((name, module) for name, module in list(model.named_modules()) if type(module) is Linear)


@contextmanager
def without_adapters(modules: nn.Module) -> Iterator[None]:
    """Disable the adapters of a module."""
    adapters = [module for module in modules.modules() if isinstance(module, LowRank)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def dropout_of(modules: nn.Module) -> float:
    """Return the largest dropout rate of the adapters in a module, 0 without adapters."""
    return max((module.dropout for module in modules.modules() if isinstance(module, LowRank)), default=0.0)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the weight of a layer without adapter that computes the same, in the dtype of the weight."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
