"""What a checkpoint contains (progress, layout, versions, settings, sizes, norms), and which are kept under a name. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint import catalog, stored_runs
from pipeline.checkpoint.contents import read_contents
from pipeline.checkpoint.native import Index
from pipeline.checkpoint.parts import ITEM_SIZE
from pipeline.checkpoint.stored_runs import StoredRun
from pipeline.common import knobs
from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.models import config_classes


@dataclass
class StoredKind:
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
    kinds: dict[str, StoredKind] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Number of elements of the full weight."""
        return prod(self.shape)


@dataclass(frozen=True)
class Summary:
    """What a checkpoint contains.

    Attributes:
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
        totals: dict[str, dict[str, Any]] = {}
        for name in self.index.kinds:
            kinds = [weight.kinds[name] for weight in self.weights.values() if name in weight.kinds]
            dtypes: Counter[str] = Counter()
            for kind in kinds:
                dtypes[kind.dtype] += kind.elements
            squares = [kind.squares for kind in kinds if kind.squares is not None]
            norm = math.sqrt(sum(squares)) if len(squares) == len(kinds) else None
            totals[name] = {"tensors": len(kinds), "elements": dtypes.total(), "dtypes": dict(dtypes), "norm": norm}
            totals[name]["not_finite"] = sum(kind.not_finite for kind in kinds)
        return totals

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
        norms: read all values, a few megabytes at a time, without verifying them.
        progress: called with the number of bytes that have been read since the last call.

    Raises:
        UserError: the index, parts.npy, a header or a file is damaged.
    """
    contents = read_contents(folder)
    index = contents.index
    weights: dict[str, Weight] = {}
    for name, entry in index.tensors.items():
        weights[name] = Weight(entry.shape, {kind: StoredKind(dtype, prod(entry.shape)) for kind, dtype in entry.dtypes.items()})
    if norms:
        with stored_runs.report_damage(folder):
            for run in stored_runs.runs(folder, contents):
                _add_values(weights[run.name].kinds[run.kind], folder / index.files[run.file].name, run)
                progress(run.bytes)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return Summary(folder, index, dict(sorted(weights.items())), files, name_of(folder))


def _add_values(kind: StoredKind, path: Path, run: StoredRun) -> None:
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


def changed_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that differ from the defaults; all of a model."""
    defaults: dict[str, Any] = {}
    for part in dataclasses.fields(RunConfig):
        if part.default_factory is not dataclasses.MISSING:
            defaults |= knobs.leaves(part.name, dataclasses.asdict(part.default_factory()))
    family = config_classes.CONFIG_CLASSES.get(config.get("model", {}).get("family", ""))
    for part in dataclasses.fields(family) if family else ():
        if part.default is not dataclasses.MISSING and part.name != "family":
            defaults[f"model.{part.name}"] = part.default
    absent = object()
    settings = (leaf for group, values in config.items() for leaf in knobs.leaves(group, values))
    return {key: value for key, value in settings if defaults.get(key, absent) != value}


def name_of(folder: Path) -> str | None:
    """The name under which a checkpoint is kept; None if it is not."""
    file = folder / catalog.KEEP
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def kept(run_dir: Path) -> dict[Path, str]:
    """The checkpoints of a run that are kept under a name, oldest first."""
    names = {folder: name_of(folder) for folder in catalog.complete(run_dir)}
    return {folder: name for folder, name in names.items() if name is not None}


def keep(folder: Path, name: str) -> None:
    """Keep a checkpoint for ever. A name that it has already is replaced.

    Raises:
        UserError: the name is empty or has several lines, another checkpoint of the run has it, or the run has removed the checkpoint in
            the meantime.
    """
    if not name.strip() or not name.isprintable():
        raise UserError.of("NAME", repr(name), "must be one line of text", "give the checkpoint a name such as before-cooldown")
    for other, known in kept(folder.parents[1]).items():
        if known == name.strip() and other.resolve() != folder.resolve():
            fix = f"choose another name, or release that one: tools/checkpoint keep {other} --remove"
            raise UserError.of("NAME", repr(name), f"is the name of {other}", fix)
    with atomic_file(folder / catalog.KEEP, "w") as handle:
        handle.write(name.strip() + "\n")
    if not (folder / catalog.INDEX).is_file():
        raise UserError.of("PATH", folder, "was removed by its run in the meantime", "keep a newer checkpoint, or increase checkpoint.keep")


def release(folder: Path) -> None:
    """No longer keep a checkpoint; its run removes it when it is not among the newest ones.

    Raises:
        UserError: it was not kept.
    """
    try:
        (folder / catalog.KEEP).unlink()
    except FileNotFoundError as error:
        raise UserError.of("PATH", folder, "is not kept under a name", "name one that tools/checkpoint keep RUN --list prints") from error
