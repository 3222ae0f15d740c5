"""Our weights, read from the tensors of another tool: renamed, joined over its tensor-parallel ranks and reordered, one at a time."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from pipeline.common.errors import UserError, Violation
from pipeline.common.host_memory import release
from pipeline.conversion.foreign_names import ForeignTensor, Naming
from pipeline.conversion.huggingface_import import FORMATS, MATCH
from pipeline.models import registry
from pipeline.models.config import ModelConfig

log = logging.getLogger("pipeline")

#: dtypes that are converted to fp32 -> their names in safetensors
DTYPES = dict(zip((torch.float64, torch.float32, torch.float16, torch.bfloat16), FORMATS, strict=True))
Shape = tuple[int, ...]


class Source(ABC):
    """The tensors of a folder of another tool.

    Attributes:
        path: the folder.
    """

    path: Path

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all tensors of the model, without a prefix."""

    def origin(self, name: str) -> str:
        """Where a tensor is stored, for messages: its name, where it may be in several files."""
        return name

    def meta(self, name: str) -> Sequence[Tensor]:
        """Shapes and dtypes of the shards of a tensor, as tensors on the meta device, in the order of tensor-parallel ranks."""
        return [torch.empty_like(shard, device="meta") for shard in self.shards(name)]

    @abstractmethod
    def shards(self, name: str) -> Sequence[Tensor]:
        """The shards, as views of mapped files where the format allows it."""


class RankFiles(Source):
    """A source whose shards are in the files of tensor-parallel ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shards: dict[str, list[tuple[Tensor, Path]]] = defaultdict(list)

    def names(self) -> list[str]:
        """Names of all tensors, as the files have them but for the numbers of layers and experts."""
        return list(self._shards)

    def origin(self, name: str) -> str:
        """The name, and the file of the first rank that has it."""
        return f"{name} ({self._shards[name][0][1].relative_to(self.path)})"

    def shards(self, name: str) -> list[Tensor]:
        """The shards, as views of the mapped files."""
        return [tensor for tensor, _ in self._shards[name]]


class NamedTensors:
    """Tensors of a source by their names in a Hugging Face class, as huggingface_import.ImportedWeights reads them.

    Attributes:
        originals: name in the class -> name in the source.
    """

    def __init__(self, source: Source, originals: dict[str, str]) -> None:
        self.path, self._source, self.originals = source.path, source, originals

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.originals)

    def shape(self, name: str) -> Shape:
        """Shape of a tensor."""
        return tuple(self._meta(name).shape)

    def number_format(self, name: str) -> str:
        """Dtype of a tensor, in the notation of safetensors where that has one."""
        dtype = self._meta(name).dtype
        return DTYPES.get(dtype, str(dtype))

    def tensor(self, name: str) -> Tensor:
        """Value of a tensor, fp32."""
        (shard,) = self._source.shards(self.originals[name])
        copied = shard.to(torch.float32, copy=True)
        release(shard)
        return copied

    def _meta(self, name: str) -> Tensor:
        (meta,) = self._source.meta(self.originals[name])
        return meta


@dataclass(frozen=True)
class _Place:
    """Where a weight, or one expert of it, is: their tensor, its row, our weight and its position in the row, the expert."""

    theirs: str
    row: ForeignTensor
    name: str
    index: int
    expert: int | None


def places(naming: Naming, config: ModelConfig) -> Iterator[_Place]:
    """Yield the place of every weight that a table knows, for all blocks and experts of a configuration."""
    for row in naming.rows:
        blocks = range(config.layers) if "{i}" in row.theirs else (None,)
        experts = range(getattr(config, "experts", 0)) if "{e}" in row.theirs else (None,)
        for block in blocks:
            for expert in experts:
                theirs = row.theirs.replace("{i}", str(block)).replace("{e}", str(expert))
                for index, pattern in enumerate(row.ours):
                    yield _Place(theirs, row, pattern.replace("{i}", str(block)), index, expert)


class ForeignWeights:
    """Our weights, from a source with the names of a table. Call `check` first."""

    def __init__(self, source: Source, naming: Naming, config: ModelConfig, fix: str = MATCH) -> None:
        """Find the tensors of each weight; `fix` is the advice for tensors that do not match it."""
        self.config, self._fix = config, fix
        self._source, self._naming = source, naming
        self._shapes = registry.weight_shapes(config)
        self._tied = registry.family_of(config).tied_weights(config)
        self._stored = {naming.current(name): name for name in source.names()}
        self._places: dict[str, dict[int | None, _Place]] = {}
        self._others: list[tuple[_Place, _Place]] = []
        for place in places(naming, config):  # of several places of a weight, the first whose tensor exists
            known = self._places.setdefault(place.name, {})
            if place.expert not in known or known[place.expert].theirs not in self._stored:
                known[place.expert] = place
            elif place.theirs in self._stored:
                self._others.append((place, known[place.expert]))
        self._unequal: Counter[str] = Counter()

    def names(self) -> list[str]:
        """Names of all weights."""
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        """Full shape of a weight."""
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        """Full value of a weight, fp32. Memory holds no other copy of it."""
        full = torch.empty(self._shapes[name])
        for place in self._places[name].values():
            self._fill(full if place.expert is None else full[place.expert], place)
        return full

    def _fill(self, full: Tensor, place: _Place) -> None:
        shards = self._source.shards(self._stored[place.theirs])
        if place.row.dim is None:
            full.copy_(shards[0])
            if any(not torch.equal(shard, shards[0]) for shard in shards[1:]):
                self._unequal[place.theirs] += 1
                full.copy_(torch.stack([shard.float() for shard in shards]).mean(0))
            return
        start = 0
        for shard in shards:
            part = place.row.part(shard, place.index, self.config)
            full.narrow(place.row.dim, start, part.shape[place.row.dim]).copy_(part)
            release(shard)
            start += part.shape[place.row.dim]

    def check(self) -> list[str]:
        """Verify that the tensors are those of the model.

        Returns:
            Tensors of the folder that are ignored.

        Raises:
            UserError: weights are missing, unexpected, of another shape or dtype; one violation each.
        """
        problems = [*self._missing(), *self._unexpected()] or [*self._untied()]
        UserError.raise_for(Violation("stage.input", self._source.path, problem, self._fix) for problem in problems)
        return [name for current, name in self._stored.items() if self._is_ignored(current)]

    def _missing(self) -> Iterator[str]:
        """Weights that are missing, or have a wrong shape or dtype. Each tensor is named once."""
        named: set[str] = set()
        for name, shape in self._shapes.items():
            if not (places := self._places.get(name)):
                yield f"{self._naming.tool} has no tensor for {name} {list(shape)} of family {self.config.family}"
            for place in (places or {}).values():
                if place.theirs in named:
                    continue
                wanted = shape if place.expert is None else shape[1:]
                if problem := self._problem(place, wanted, name):
                    named.add(place.theirs)
                    yield problem

    def _problem(self, place: _Place, wanted: Shape, name: str) -> str | None:
        ours = f"{name} {list(wanted)}"
        if place.theirs not in self._stored:
            return f"{place.theirs} is missing, which holds {ours}"
        stored = self._stored[place.theirs]
        metas = self._source.meta(stored)
        if (shape := _joined([*metas], place, self.config)) != wanted:
            shapes = " + ".join(str(list(meta.shape)) for meta in metas)
            return f"{self._source.origin(stored)} is {shapes}, and the model has {ours} there" + (f", not {list(shape)}" if shape else "")
        if dtypes := {str(meta.dtype) for meta in metas if meta.dtype not in DTYPES}:
            return f"{self._source.origin(stored)} is {', '.join(sorted(dtypes))}; supported are {', '.join(map(str, DTYPES))}"
        return None

    def _unexpected(self) -> Iterator[str]:
        """Tensors that the model does not have."""
        used = {place.theirs for name in (*self._shapes, *self._tied) for place in self._places.get(name, {}).values()}
        used |= {place.theirs for place, _ in self._others if place.name in self._shapes}
        for current, name in self._stored.items():
            if current not in used and not self._is_ignored(current):
                shapes = " + ".join(str(list(meta.shape)) for meta in self._source.meta(name))
                yield f"{self._source.origin(name)} {shapes} is not a weight of the model"

    def _untied(self) -> Iterator[str]:
        """Tensors that must equal another one, since both are the same weight, and do not."""
        tied = [
            (place, other)
            for name, same in self._tied.items()
            for place, other in zip(self._places.get(name, {}).values(), self._places[same].values(), strict=False)
            if place.theirs in self._stored
        ]
        for place, other in [*tied, *((place, other) for place, other in self._others if place.name in self._shapes)]:
            pairs = zip(*(self._source.shards(self._stored[item.theirs]) for item in (place, other)), strict=False)
            if not all(torch.equal(left, right) for left, right in pairs):
                yield f"{place.theirs} differs from {other.theirs}; in the model both are {other.name}"

    def _is_ignored(self, current: str) -> bool:
        return any(fnmatchcase(current, pattern) for pattern in self._naming.ignored)

    def warn(self) -> None:
        """Log what reading has shown: weights of which the ranks that must hold the same have different values."""
        if self._unequal:
            names = ", ".join(sorted(self._unequal)[:5]) + (", ..." if len(self._unequal) > 5 else "")
            log.warning("convert: %d tensors differ between tensor-parallel ranks; imported is their mean: %s", len(self._unequal), names)


def _joined(metas: list[Tensor], place: _Place, config: ModelConfig) -> Shape | None:
    """Return the shape of the weight that shards make; None if they do not fit together."""
    try:
        parts = [place.row.part(meta, place.index, config) for meta in metas]
        if place.row.dim is None:
            return tuple(parts[0].shape) if len({meta.shape for meta in metas}) == 1 else None
        return tuple(torch.cat(parts, place.row.dim).shape)
    except (RuntimeError, IndexError):
        return None
