"""The tensors of a stock model by the names that its files have: a tensor for each expert, also where the source has them fused.

Since transformers 5 a class has one parameter for all experts of a block, and `save_pretrained` writes one tensor for each of them. Tools
that save the state dict of a module (DeepSpeed, torch.distributed.checkpoint) write the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from pipeline.models.stock_tensors import StockTensor

#: Last part of the name of our weight -> the parameter of the class, and which half of its rows is the weight, None for all.
_FUSED: dict[str, tuple[str, int | None]] = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}


class NamedStock(Protocol):
    """The tensors of a stock model, by the names of its class.

    Attributes:
        path: where they are, for messages.
    """

    path: Path

    def names(self) -> list[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    def number_format(self, name: str) -> str:
        """Dtype of a tensor, in the notation of safetensors."""

    def tensor(self, name: str) -> Tensor:
        """Value of a tensor, fp32."""


def with_single_experts(stock: NamedStock, entries: Iterable[StockTensor]) -> NamedStock:
    """Return tensors with a name for each expert.

    Args:
        stock: the tensors, which may be those of all experts.
        entries: the table of the class.
    """
    names = set(stock.names())
    places: dict[str, tuple[str, int, int | None]] = {}
    for entry in entries:
        leaf = entry.names[0].rpartition(".")[2] if entry.names else ""
        if entry.expert != 0 or leaf not in _FUSED:
            continue
        module, _, end = entry.hf_name.partition(".experts.0.")
        parameter, half = _FUSED[leaf]
        fused = f"{module}.experts.{parameter}"
        if fused in names and len(stock.shape(fused)) == 3:
            places |= {f"{module}.experts.{index}.{end}": (fused, index, half) for index in range(stock.shape(fused)[0])}
    return _SingleExperts(stock, places) if places else stock


class _SingleExperts:
    """Tensors of which some are parts of others, one of which is kept in memory.

    Args:
        stock: the tensors.
        places: name of a part -> the tensor, its index along dim 0, and the half of the rows.
    """

    def __init__(self, stock: NamedStock, places: dict[str, tuple[str, int, int | None]]) -> None:
        self.path = stock.path
        self._stock, self._places = stock, places
        self._last: tuple[str, Tensor] | None = None

    def names(self) -> list[str]:
        """Names of all tensors."""
        fused = {name for name, _, _ in self._places.values()}
        return [*(name for name in self._stock.names() if name not in fused), *self._places]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        if name not in self._places:
            return self._stock.shape(name)
        fused, _, half = self._places[name]
        _, rows, columns = self._stock.shape(fused)
        return (rows if half is None else rows // 2, columns)

    def number_format(self, name: str) -> str:
        """Dtype of a tensor, in the notation of safetensors."""
        return self._stock.number_format(self._places[name][0] if name in self._places else name)

    def tensor(self, name: str) -> Tensor:
        """Value of a tensor, fp32."""
        if name not in self._places:
            return self._stock.tensor(name)
        fused, index, half = self._places[name]
        if self._last is None or self._last[0] != fused:
            self._last = None  # before the next one is read
            self._last = fused, self._stock.tensor(fused)
        value = self._last[1][index]
        return value if half is None else value.chunk(2)[half]
