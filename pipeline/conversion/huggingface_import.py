"""Imports the weights of a Hugging Face folder, with one stock tensor in memory at a time.

Tensors have the names of the files: one for each expert, also where the source has them fused. Since transformers 5 a class has one
parameter for all experts of a block, and `save_pretrained` writes one tensor for each of them. Tools that save the state dict of a module
(DeepSpeed, torch.distributed.checkpoint) write the parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from copy import copy as shallow
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.checkpoint.weights import Weights
from pipeline.common.errors import UserError, Violation
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import StockTensor

#: Last part of the name of our weight -> the parameter of the class, and which half of its rows is the weight, None for all.
_FUSED: dict[str, tuple[str, int | None]] = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}
#: Buffers that older releases of transformers saved and that are recomputed.
UNUSED = ("*.rotary_emb.inv_freq",)
GENERATION_CONFIG = "generation_config.json"
#: Advice for tensors that do not match their model.
MATCH = "use a folder whose weights match its config.json, or fix config.json"
FORMATS = ("F64", "F32", "F16", "BF16")


class NamedStock(Weights, Protocol):
    """The tensors of a stock model, by the names of its class; `path` is where they are, for messages."""

    path: Path

    def number_format(self, name: str) -> str:
        """Dtype of a tensor, in the notation of safetensors."""


def with_single_experts(stock: NamedStock, entries: Iterable[StockTensor]) -> NamedStock:
    """Return tensors with a name for each expert.

    Args:
        stock: the tensors, which may be those of all experts.
        entries: the table of the class.
    """
    names = set(stock.names())
    parts: dict[str, _Part] = {}
    for entry in entries:
        leaf = entry.names[0].rpartition(".")[2] if entry.names else ""
        if entry.expert != 0 or leaf not in _FUSED:
            continue
        module, _, end = entry.hf_name.partition(".experts.0.")
        parameter, half = _FUSED[leaf]
        fused = f"{module}.experts.{parameter}"
        if fused not in names or len(stock.shape(fused)) != 3:
            continue
        experts, rows, columns = stock.shape(fused)
        if half is None or rows % 2 == 0:
            first, rows = (0, rows) if half is None else (half * rows // 2, rows // 2)
            for index in range(experts):
                name = f"{module}.experts.{index}.{end}"
                parts[name] = _Part((fused,), (index, slice(first, first + rows)), (rows, columns), fused)
    return _Parts(stock, parts) if parts else stock


def with_own_rows(stock: NamedStock, entries: Iterable[StockTensor], shapes: dict[str, tuple[int, ...]]) -> NamedStock:
    """Return tensors that each have the rows of the table, where the files divide those of a parameter otherwise.

    Args:
        stock: the tensors, which may be the parameter, or other parts of it by the same names.
        entries: the table of the class.
        shapes: name of our weight -> its shape.
    """
    parameters: dict[str, list[tuple[str, int]]] = {}
    for entry in entries:
        if entry.part_of:
            parameters.setdefault(entry.part_of, []).append((entry.hf_name, shapes[entry.names[0]][0]))
    names = set(stock.names())
    parts: dict[str, _Part] = {}
    for parameter, members in parameters.items():
        sources = (parameter,) if parameter in names else tuple(name for name, _ in members)
        if not names.issuperset(sources) or sum(sum(stock.shape(name)[:1]) for name in sources) != sum(rows for _, rows in members):
            continue  # the check names them
        first = 0
        for name, rows in members:
            like = name if name in sources else sources[0]
            parts[name] = _Part(sources, (slice(first, first + rows),), (rows, *stock.shape(like)[1:]), like)
            first += rows
    return _Parts(stock, parts) if parts else stock


@dataclass(frozen=True)
class _Part:
    """A tensor that the files have as a part of others.

    Attributes:
        sources: names of these, whose rows are one after the other.
        index: of the part in all of them.
        like: the source that has its dtype.
    """

    sources: tuple[str, ...]
    index: tuple[int | slice, ...]
    shape: tuple[int, ...]
    like: str


class _Parts:
    """Tensors of which some are parts of others; what the last of these was taken from is kept in memory."""

    def __init__(self, stock: NamedStock, parts: dict[str, _Part]) -> None:
        self.path = stock.path
        self._stock, self._parts = stock, parts
        self._last: tuple[tuple[str, ...], Tensor] | None = None

    def names(self) -> list[str]:
        """Names of all tensors."""
        sources = {name for part in self._parts.values() for name in part.sources}
        return [*(name for name in self._stock.names() if name not in sources), *self._parts]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._parts[name].shape if name in self._parts else self._stock.shape(name)

    def number_format(self, name: str) -> str:
        """Dtype of a tensor, in the notation of safetensors."""
        return self._stock.number_format(self._parts[name].like if name in self._parts else name)

    def tensor(self, name: str) -> Tensor:
        """Value of a tensor, fp32."""
        if name not in self._parts:
            return self._stock.tensor(name)
        part = self._parts[name]
        if self._last is None or self._last[0] != part.sources:
            self._last = None  # before the next one is read
            tensors = [self._stock.tensor(source) for source in part.sources]
            self._last = part.sources, tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return self._last[1][part.index]


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        UserError: it is missing or not a JSON object.
    """
    return _read_object(folder, "config.json", "use a folder that save_pretrained wrote, or a downloaded model repository")


def read_generation_config(folder: Path) -> dict[str, Any] | None:
    """Read generation_config.json; None if the folder has none.

    Raises:
        UserError: it is not a JSON object.
    """
    if not (folder / GENERATION_CONFIG).is_file():
        return None
    return _read_object(folder, GENERATION_CONFIG, "download it again, or remove it")


def check_tokenizer(folder: Path) -> None:
    """Verify that tokenizer.json, if the folder has one, was not truncated.

    Raises:
        UserError: it is not a JSON object.
    """
    if (folder / "tokenizer.json").is_file():
        _read_object(folder, "tokenizer.json", "download it again, or remove it")


def _read_object(folder: Path, name: str, fix: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError.of("stage.input", folder, f"has no readable {name}: {error}", fix) from error
    return content


class ImportedWeights:
    """Native weights, read from those of a stock model. Call `check` first.

    Attributes:
        config: the configuration, with the fields that only the weights tell.
    """

    def __init__(self, stock: NamedStock, config: ModelConfig, fix: str = MATCH) -> None:
        """Find the tensors of each weight; `fix` is the advice for tensors that do not match it."""
        self.config = config = registry.mapping_of(config).from_weights(config, stock)
        self._shapes = registry.weight_shapes(config)
        self._entries, self._copies = registry.stock_tensors(config)
        self._stock, self._fix = (stock := self._as_in_the_table(stock)), fix
        self._names = set(stock.names())
        self._stored = {entry.hf_name: entry.hf_name for entry in self._entries if entry.hf_name in self._names}
        for copy, name in self._copies.items():  # the files may store a shared tensor under any of its names
            if copy in self._names:
                self._stored.setdefault(name, copy)
        mapping = registry.mapping_of(config)
        self._unused, self._zeros = (*UNUSED, *mapping.ignored_weights, *mapping.left_over_weights(config)), mapping.zero_weights
        self._computed = mapping.computed_weights
        self._entries_of: dict[str, list[StockTensor]] = {name: [] for name in self._shapes}
        for entry in self._entries:
            for name in entry.names:
                self._entries_of[name].append(entry)
        uncovered = [name for name, entries in self._entries_of.items() if not entries]
        assert not uncovered, f"the mapping of {config.family} has no entry for {uncovered}"

    def names(self) -> list[str]:
        """Names of all weights."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        """Full value of a weight, fp32."""
        entries = self._entries_of[name]
        if entries[0].expert is None:
            return self._read_entry(entries[0], name)
        experts = torch.empty(self._shapes[name])
        for entry in entries:
            assert entry.expert is not None, f"{entry.hf_name} is not the weight of an expert"
            experts[entry.expert] = self._read_entry(entry, name)
        return experts

    def _read_entry(self, entry: StockTensor, name: str) -> Tensor:
        theirs = self._stock.tensor(self._stored[entry.hf_name])
        return entry.from_hf(theirs, [self._shapes[ours] for ours in entry.names])[entry.names.index(name)].contiguous()

    def check(self) -> list[str]:
        """Verify the files against the stock class with this configuration.

        Returns:
            Tensors of the files that are ignored, since the class does not use them.

        Raises:
            UserError: weights are missing, unexpected, of another shape, or of an unsupported dtype; one violation each.
        """
        problems = [*self._missing(), *self._unexpected()] or [*self._unequal()]
        UserError.raise_for(Violation("stage.input", self._stock.path, problem, self._fix) for problem in problems)
        return [name for name in self._stock.names() if self._is_unused(name)]

    def _missing(self) -> Iterator[str]:
        """Weights that are missing, or have a wrong shape or dtype."""
        for entry in self._entries:
            expected = list(entry.shape([self._shapes[name] for name in entry.names]))
            stored = self._stored.get(entry.hf_name)
            if stored is None:
                yield f"{entry.hf_name} {expected} is missing"
            elif list(self._stock.shape(stored)) != expected:
                yield f"{stored} is {list(self._stock.shape(stored))}, not {expected}"
            elif self._stock.number_format(stored) not in FORMATS:
                yield f"{stored} is {self._stock.number_format(stored)}; supported are {', '.join(FORMATS)}"

    def _unexpected(self) -> Iterator[str]:
        """Tensors that the class does not have."""
        known = {entry.hf_name for entry in self._entries} | self._copies.keys() | set(self._zeros) | self._computed.keys()
        for name in self._stock.names():
            if name not in known and not self._is_unused(name):
                yield f"{name} {list(self._stock.shape(name))} is not a weight of the model in config.json"

    def _unequal(self) -> Iterator[str]:
        """Tensors that must equal another one, zero or a constant, and do not."""
        for copy, name in self._copies.items():
            if {copy, name} <= self._names and not torch.equal(self._stock.tensor(copy), self._stock.tensor(name)):
                yield f"{copy} differs from {name}; according to config.json they are tied"
        for name in self._zeros:
            if name in self._names and name not in self._stored and self._stock.tensor(name).any():
                yield f"{name} is not zero, and the family has no such weight"
        for name in self._computed.keys() & self._names:
            expected, stored = self._computed[name](self.config), self._stock.tensor(name)
            if expected.shape != stored.shape or not torch.allclose(expected, stored, rtol=0, atol=1e-5):
                yield f"{name} is not what the family computes in its place"
        for entry in (entry for entry in self._entries if entry.constant is not None):
            value = self._stock.tensor(entry.hf_name)
            if not torch.isclose(value, torch.tensor(entry.constant), rtol=2**-8):  # files have it in bf16
                yield f"{entry.hf_name} is {value:g}, and the family has {entry.constant:g} there"

    def _is_unused(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._unused)

    def reading(self, stock: NamedStock) -> ImportedWeights:
        """Return what other tensors hold for these weights, such as their moments, given by the same names."""
        other = shallow(self)
        other._stock = self._as_in_the_table(stock)
        return other

    def _as_in_the_table(self, stock: NamedStock) -> NamedStock:
        return with_own_rows(with_single_experts(stock, self._entries), self._entries, self._shapes)

    def differences(self, stock: NamedStock) -> Iterator[str]:
        """Name the tensors of the weights that other ones lack, or that have another shape there."""
        other = self._as_in_the_table(stock)
        names = set(other.names())
        for name in (self._stored[entry.hf_name] for entry in self._entries if entry.names and entry.hf_name in self._stored):
            shape = list(self._stock.shape(name))
            if name not in names:
                yield f"{name} {shape} is missing"
            elif list(other.shape(name)) != shape:
                yield f"{name} is {list(other.shape(name))}, and the weight {shape}"
