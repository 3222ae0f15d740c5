"""The tensors of a Hugging Face class and the weights of ours that each contains, with the conversion in both directions.

Importing it loads no torch, as every module that a family's file imports at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

#: placeholder of a block index -> (block index in the Hugging Face model, block index in ours) of all its blocks
SECTIONS: dict[str, Callable[[Any], Iterable[tuple[int, int]]]] = {
    "i": lambda config: ((index, index) for index in range(config.layers)),
    "encoder": lambda config: ((index, index) for index in range(config.encoder_blocks)),
    "decoder": lambda config: ((index, index + config.encoder_blocks) for index in range(config.decoder_blocks)),
}


@dataclass(frozen=True)
class StockTensor:
    """One Hugging Face tensor and the weights of our model that it contains.

    Attributes:
        hf_name: name of the Hugging Face tensor; `{i}` is replaced by the index of each block, `{encoder}` and `{decoder}` by the index of
            each block of the encoder or decoder, `{e}` by the index of each expert.
        names: names of our weights, in their order along dim 0 of a fused Hugging Face tensor.
        transposed: the Hugging Face tensor is (input, output), as in GPT-2's Conv1D; our weights are always (output, input).
        interleaved: field of our configuration with the number of groups (BLOOM: heads) of a fused tensor that holds the first group of
            each weight, then the second of each, and so on; empty if the weights are concatenated.
        groups: that number, set by `for_config`.
        expert: the Hugging Face tensor is this index of dim 0 of our weight, a stack of experts.
        stacked: our weights and the Hugging Face tensor are stacks of experts along dim 0: all else is said of each expert.
        added_dims: how many dims of size 1 the Hugging Face tensor has before those of our weight, and after them.
        part_of: a parameter of the class whose rows are those of this tensor and of the other ones with the same entry; files may hold the
            parameter, or divide its rows in other places. Empty for none.
        constant: the Hugging Face tensor is this number, in every model of the class; we have no such weight, and `names` is empty.
    """

    hf_name: str
    names: tuple[str, ...]
    transposed: bool = False
    interleaved: str = ""
    groups: int = 1
    expert: int | None = None
    stacked: bool = False
    added_dims: tuple[int, int] = (0, 0)
    part_of: str = ""
    constant: float | None = None

    def for_config(self, config: Any) -> StockTensor:
        """Return the entry with `groups` of a configuration."""
        return replace(self, groups=getattr(config, self.interleaved)) if self.interleaved else self

    @property
    def blocks(self) -> str:
        """The blocks that have such a tensor: a key of SECTIONS, or "" for a weight outside the blocks."""
        return next((name for name in SECTIONS if f"{{{name}}}" in self.hf_name), "")

    def for_block(self, hf_index: int, index: int) -> StockTensor:
        """Return the tensor of one block, given its index in the Hugging Face model and in ours."""
        placeholder = f"{{{self.blocks}}}"
        names = tuple(name.replace(placeholder, str(index)) for name in self.names)
        hf_name, part_of = (name.replace(placeholder, str(hf_index)) for name in (self.hf_name, self.part_of))
        return replace(self, hf_name=hf_name, names=names, part_of=part_of)

    def for_expert(self, index: int) -> StockTensor:
        """Return the tensor of one expert."""
        return replace(self, hf_name=self.hf_name.replace("{e}", str(index)), expert=index)

    def to_hf(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the Hugging Face tensor, from our weights in the order of `names`."""
        import torch

        if self.constant is not None:
            return torch.tensor(self.constant)
        matrices = [weight if self.expert is None else weight[self.expert] for weight in weights]
        dim = int(self.stacked)
        if self.groups > 1:
            grouped = [matrix.unflatten(dim, (self.groups, -1)) for matrix in matrices]
            matrices = [torch.cat(grouped, dim=dim + 1).flatten(dim, dim + 1)]
        fused = matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=dim)
        before, after = self.added_dims
        fused = fused[(None,) * before + (...,) + (None,) * after]
        return fused.transpose(-2, -1).contiguous() if self.transposed else fused.contiguous()

    def from_hf(self, tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return our weights, the inverse of `to_hf`: views of the tensor in the order of `names`.

        Args:
            tensor: the Hugging Face tensor, of the shape that `shape` returns.
            shapes: shapes of our weights; for the tensor of an expert, the returned tensors are one index of them along dim 0.
        """
        before, after = self.added_dims
        fused = tensor.transpose(-2, -1) if self.transposed else tensor.view(tensor.shape[before : tensor.dim() - after])
        dim = int(self.stacked)
        sizes = [shape[dim] for shape in self._matrices(shapes)]
        if self.groups > 1:
            grouped = fused.unflatten(dim, (self.groups, -1))
            return [group.flatten(dim, dim + 1) for group in grouped.split([size // self.groups for size in sizes], dim=dim + 1)]
        return list(fused.split(sizes, dim=dim))

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of the Hugging Face tensor, from the shapes of our weights."""
        if self.constant is not None:
            return ()
        matrices = self._matrices(shapes)
        dim = int(self.stacked)
        fused = (*matrices[0][:dim], sum(matrix[dim] for matrix in matrices), *matrices[0][dim + 1 :])
        before, after = self.added_dims
        return (*fused[:-2], *fused[:-3:-1]) if self.transposed else (1,) * before + fused + (1,) * after

    def _matrices(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of what the Hugging Face tensor contains: our weights, or one expert of each."""
        return [tuple(shape) if self.expert is None else tuple(shape[1:]) for shape in shapes]


def tensors(
    hf_module: str, *modules: str, leaves: Sequence[str] = ("weight",), transposed: bool = False, interleaved: str = ""
) -> tuple[StockTensor, ...]:
    """Return the tensors of a module, one for each of its leaves (weight, bias); `transposed` applies to the weight only."""
    return tuple(
        StockTensor(f"{hf_module}.{leaf}", tuple(f"{module}.{leaf}" for module in modules), transposed and leaf == "weight", interleaved)
        for leaf in leaves
    )


def gated_mlp(hf_module: str, module: str) -> tuple[StockTensor, ...]:
    """Return the tensors of a gated feed-forward whose matrices are named as Llama's are."""
    return tuple(entry for name in ("gate", "up", "down") for entry in tensors(f"{hf_module}.{name}_proj", f"{module}.{name}"))


def gated_experts(hf_module: str, module: str) -> tuple[StockTensor, ...]:
    """Return the tensors of the experts of a MoE layer, which are such feed-forwards."""
    return tuple(
        StockTensor(f"{hf_module}.experts.{{e}}.{name}_proj.weight", (f"{module}.experts.{name}",)) for name in ("gate", "up", "down")
    )


@dataclass(frozen=True)
class BlockTensors:
    """Tensors that only some of the blocks have, or every expert of a block.

    Attributes:
        tensors: with `{i}`, and with `{e}` for experts.
        where: returns the (Hugging Face index, our index) of the blocks that have these tensors.
        experts: field of our configuration with the number of experts.
    """

    tensors: tuple[StockTensor, ...]
    where: Callable[[Any], Iterable[tuple[int, int]]] = SECTIONS["i"]
    experts: str = ""

    def expand(self, config: Any) -> Iterator[StockTensor]:
        """Yield the tensors of all these blocks."""
        for hf_index, index in self.where(config):
            for entry in self.tensors:
                filled = entry.for_block(hf_index, index)
                if "{e}" in entry.hf_name:
                    yield from (filled.for_expert(index) for index in range(getattr(config, self.experts)))
                else:
                    yield filled


def expand(table: Iterable[StockTensor | BlockTensors], config: Any) -> Iterator[StockTensor]:
    """Yield every tensor of a table for a configuration. Consecutive entries that repeat for the same blocks are yielded block by block."""
    for section, group in groupby(table, key=lambda item: item.blocks if isinstance(item, StockTensor) else "BLOCKS"):
        if section in SECTIONS:
            repeated = BlockTensors(tuple(entry for entry in group if isinstance(entry, StockTensor)), SECTIONS[section]).expand(config)
            yield from (entry.for_config(config) for entry in repeated)
            continue
        for item in group:
            yield from (entry.for_config(config) for entry in ([item] if isinstance(item, StockTensor) else item.expand(config)))
