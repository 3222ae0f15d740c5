"""What a checkpoint contains: progress, layout, versions, settings, sizes and, if asked for, norms. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint import keeping, stored_runs
from pipeline.checkpoint.contents import read_contents
from pipeline.checkpoint.native import Index
from pipeline.checkpoint.parts import ITEM_SIZE
from pipeline.checkpoint.stored_runs import StoredRun
from pipeline.config.schema import RunConfig
from pipeline.models import config_classes


@dataclass
class Kind:
    """What is stored of a weight in one kind.

    Attributes:
        dtype: name in safetensors.
        elements: number that is stored.
        squares: sum of the squares of its finite values; None if they have not been read.
        largest: largest absolute finite value.
        not_finite: number of values that are infinite or not a number.
    """

    dtype: str
    elements: int = 0
    squares: float | None = None
    largest: float = 0.0
    not_finite: int = 0

    @property
    def norm(self) -> float | None:
        """The 2-norm of the finite values."""
        return None if self.squares is None else math.sqrt(self.squares)


@dataclass
class Weight:
    """A weight: the shape of the full weight, and its kinds."""

    shape: tuple[int, ...]
    kinds: dict[str, Kind] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Number of elements of the full weight."""
        return prod(self.shape)


@dataclass(frozen=True)
class Summary:
    """What a checkpoint contains.

    Attributes:
        path: its folder.
        index: its index.
        weights: name -> what is stored of it.
        files: name of every file of the folder -> its bytes.
        kept: the name under which the checkpoint is kept; None if it is not.
    """

    path: Path
    index: Index
    weights: dict[str, Weight]
    files: dict[str, int]
    kept: str | None

    @property
    def state_bytes(self) -> int:
        """Bytes of all stored elements."""
        kinds = (kind for weight in self.weights.values() for kind in weight.kinds.values())
        return sum(kind.elements * ITEM_SIZE[kind.dtype] for kind in kinds)

    def totals(self) -> dict[str, dict[str, Any]]:
        """Kind -> number of weights and elements, elements by dtype, and 2-norm over all weights (None if not read)."""
        found: dict[str, dict[str, Any]] = {}
        for name in self.index.kinds:
            kinds = [weight.kinds[name] for weight in self.weights.values() if name in weight.kinds]
            dtypes: Counter[str] = Counter()
            for kind in kinds:
                dtypes[kind.dtype] += kind.elements
            squares = [kind.squares for kind in kinds if kind.squares is not None]
            norm = math.sqrt(sum(squares)) if len(squares) == len(kinds) else None
            found[name] = {"tensors": len(kinds), "elements": dtypes.total(), "dtypes": dict(dtypes), "norm": norm}
            found[name]["not_finite"] = sum(kind.not_finite for kind in kinds)
        return found

    def settings(self) -> dict[str, Any]:
        """The settings of the run that differ from the defaults: dotted key -> value."""
        return changed_settings(self.index.config)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        index = self.index
        weights = {
            name: {
                "shape": list(weight.shape),
                "kinds": {
                    kind: {"dtype": k.dtype, "elements": k.elements}
                    | ({} if k.squares is None else {"norm": k.norm, "largest": k.largest, "not_finite": k.not_finite})
                    for kind, k in weight.kinds.items()
                },
            }
            for name, weight in self.weights.items()
        }
        return {
            "path": str(self.path),
            "format": index.format,
            "train_state": dataclasses.asdict(index.train_state),
            "layout": index.layout,
            "versions": index.versions,
            "parent": index.parent,
            "kept": self.kept,
            "settings": self.settings(),
            "kinds": self.totals(),
            "state_bytes": self.state_bytes,
            "files": self.files,
            "tensors": weights,
        }


def read(folder: Path, *, norms: bool = False, progress: Callable[[int], object] = lambda _: None) -> Summary:
    """Read what a checkpoint contains: the index and, in format 1, the headers of its files; and with `norms` all of its bytes.

    Args:
        folder: of the checkpoint.
        norms: read all values, a few megabytes at a time, without verifying them.
        progress: called with the number of bytes that have been read since the last call.

    Raises:
        UserError: the index, parts.npy, a header or a file is damaged.
    """
    contents = read_contents(folder)
    index = contents.index
    weights: dict[str, Weight] = {}
    for name, entry in index.tensors.items():
        weights[name] = Weight(entry.shape, {kind: Kind(dtype, prod(entry.shape)) for kind, dtype in entry.dtypes.items()})
    if norms:
        with stored_runs.report_damage(folder):
            for run in stored_runs.runs(folder, contents):
                _add_values(weights[run.name].kinds[run.kind], folder / index.files[run.file].name, run)
                progress(run.bytes)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return Summary(folder, index, dict(sorted(weights.items())), files, keeping.name_of(folder))


def _add_values(kind: Kind, path: Path, run: StoredRun) -> None:
    """Add the values of a run to the sums of its kind."""
    kind.squares = kind.squares or 0.0
    for values in stored_runs.values(path, run):
        wide = values.astype(np.float64)
        finite = np.isfinite(wide)
        if not finite.all():
            kind.not_finite += int((~finite).sum())
            wide = wide[finite]
        kind.squares += float(wide @ wide)
        kind.largest = max(kind.largest, float(np.abs(wide).max(initial=0.0)))


def flat_settings(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a configuration as dotted keys with their values."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def changed_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that differ from the defaults; all of a model."""
    defaults: dict[str, Any] = {}
    for part in dataclasses.fields(RunConfig):
        if part.default_factory is not dataclasses.MISSING:
            defaults |= flat_settings({part.name: dataclasses.asdict(part.default_factory())})
    family = config_classes.CONFIG_CLASSES.get(config.get("model", {}).get("family", ""))
    for part in dataclasses.fields(family) if family else ():
        if part.default is not dataclasses.MISSING and part.name != "family":
            defaults[f"model.{part.name}"] = part.default
    absent = object()
    return {key: value for key, value in flat_settings(config) if defaults.get(key, absent) != value}
