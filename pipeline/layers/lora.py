"""LoRA (Hu et al. 2022, https://arxiv.org/abs/2106.09685): a linear layer plus a trained product of two matrices of low rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.experts import Experts
from pipeline.layers.linear import Linear

#: x, weight -> x @ weight.T
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LoraSpec:
    """The adapter of one linear layer; its output is scaled by alpha / rank."""

    rank: int
    alpha: float
    dropout: float = 0.0


class LowRank(nn.Module):
    """The adapter: b(a(dropout(x))) * alpha / rank. Slices of `a` along its inputs and of `b` along its outputs work, too.

    Args:
        in_features, out_features: of the layer.
        spec: of the adapter.
        experts: number of experts that have one each, stacked along dim 0; None for a linear layer.

    Attributes:
        input_slices, input_slice: number of equal slices of the full input's columns, and the index of the one that is passed. Dropout
            drops the same elements of it as of the full input.
    """

    def __init__(self, in_features: int, out_features: int, spec: LoraSpec, experts: int | None = None) -> None:
        super().__init__()
        stack = () if experts is None else (experts,)
        self.scale, self.dropout, self.enabled = spec.alpha / spec.rank, spec.dropout, True
        self.input_slices, self.input_slice = 1, 0
        self.a = nn.Parameter(torch.empty(*stack, spec.rank, in_features))
        self.b = nn.Parameter(torch.empty(*stack, out_features, spec.rank))

    def forward(self, x: Tensor, product: Product = F.linear) -> Tensor:
        """(..., input) -> (..., output); product multiplies by the stacked matrices of experts."""
        if self.dropout and self.training:
            x = self._drop(x)
        return product(product(x, self.a), self.b) * self.scale

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


class LoRAExperts(Experts):
    """Experts with an adapter of each expert for some of their matrices. The weights keep their names; the adapters are lora.MATRIX.

    Args:
        base: the experts.
        specs: name of a matrix -> its adapters.
    """

    def __init__(self, base: Experts, specs: Mapping[str, LoraSpec]) -> None:
        experts, ffn_hidden, hidden = base.up.shape
        super().__init__(experts, hidden, ffn_hidden, gated=base.gate is not None)
        self.activation, self.products, self.down_ranks = base.activation, base.products, base.down_ranks
        self.gate, self.up, self.down = base.gate, base.up, base.down
        self.gate_bias, self.up_bias, self.down_bias = base.gate_bias, base.up_bias, base.down_bias
        shapes = {name: weight.shape for name, weight in base.named_parameters()}
        self.lora = nn.ModuleDict({name: LowRank(shapes[name][2], shapes[name][1], spec, experts) for name, spec in specs.items()})

    def grouped(self, matrix: str, x: Tensor, counts: Tensor) -> Tensor:
        """See Experts."""
        return self._adapted(matrix, super().grouped(matrix, x, counts), x, lambda x, weight: self.products.grouped(x, weight, counts))

    def batched(self, matrix: str, x: Tensor) -> Tensor:
        """See Experts."""
        return self._adapted(matrix, super().batched(matrix, x), x, self.products.batched)

    def _adapted(self, matrix: str, y: Tensor, x: Tensor, product: Product) -> Tensor:
        """Add the output of the adapters of a matrix, if it has some."""
        if matrix not in self.lora or not self.lora[matrix].enabled:
            return y
        added: Tensor = self.lora[matrix](x, product)
        return y + added


def add_adapters(model: nn.Module, spec_of: Callable[[str], LoraSpec | None]) -> None:
    """Replace linear layers and routed experts of a model by such with adapters.

    Args:
        model: the full model.
        spec_of: name of a linear layer, or of a matrix of experts -> its adapter, None for none.
    """
    for name, layer in linear_layers(model):
        if (spec := spec_of(name)) is not None:
            _replace(model, name, LoRALinear(layer, spec))
    for name, experts in [(name, module) for name, module in model.named_modules() if type(module) is Experts]:
        by_matrix = {matrix: spec_of(f"{name}.{matrix}") for matrix, weight in experts.named_parameters() if weight.dim() == 3}
        if specs := {matrix: spec for matrix, spec in by_matrix.items() if spec is not None}:
            _replace(model, name, LoRAExperts(experts, specs))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a module of a model."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


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
    """Return the weight of a layer, or the stacked ones of experts, without adapter that compute the same, in the dtype of the weight."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
