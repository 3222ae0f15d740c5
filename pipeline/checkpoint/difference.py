"""The settings and tensors in which two checkpoints differ, whatever their layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint import inspection, native, parts, stored_runs
from pipeline.checkpoint.inspection import Summary
from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.verify import check_sizes
from pipeline.common import knobs

#: Elements that are compared at a time.
_CHUNK = 1 << 22
#: Value of a setting that a checkpoint does not have.
ABSENT = "(not set)"


@dataclass(frozen=True)
class TensorDifference:
    """How two tensors differ.

    Attributes:
        kind: "weight" or a state of the optimizer.
        reason: why they cannot be compared; empty if they can.
        differing: number of elements that differ.
        absolute: largest |a - b| of an element.
        relative: largest |a - b| / max(|a|, |b|) of an element.
        norm: 2-norm of a - b over that of a.
    """

    name: str
    kind: str
    reason: str = ""
    differing: int = 0
    elements: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    norm: float = 0.0


@dataclass
class CheckpointDifference:
    """How two checkpoints differ.

    Attributes:
        paths: the folders of both.
        settings: dotted key -> its two values; counters of the run are below "train_state".
        equal: number of tensors that are equal.
        by_digest: how many of these are equal by the digests of both, and were not read.
    """

    paths: tuple[Path, Path]
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    tensors: list[TensorDifference] = field(default_factory=list)
    equal: int = 0
    by_digest: int = 0

    def __bool__(self) -> bool:
        return bool(self.settings or self.tensors)


def compare(
    a: Path,
    b: Path,
    *,
    tensors: bool = True,
    settings: bool = True,
    read: bool = False,
    progress: Callable[[str], object] = lambda _: None,
) -> CheckpointDifference:
    """Compare two checkpoints of any format and layout. Memory holds one full tensor of each.

    A tensor is not read if both divide it alike and have the same digests of it; that the files have the right sizes is always verified.

    Args:
        settings: compare the settings, the counters and the data.
        read: read tensors with equal digests, too, which verifies all of their bytes.
        progress: called with the name of each weight before it is compared.

    Raises:
        UserError: one of them is damaged.
    """
    both = inspection.read(a), inspection.read(b)
    result = CheckpointDifference((a, b), _settings(*both) if settings else {})
    if tensors:
        for side in both:
            check_sizes(side.path, side.index)
        readers = Checkpoint(a), Checkpoint(b)
        for name in sorted(both[0].weights.keys() | both[1].weights.keys()):
            progress(name)
            _compare_weight(name, both, readers, result, read=read)
    return result


def _settings(a: Summary, b: Summary) -> dict[str, tuple[Any, Any]]:
    """The settings that differ: dotted key -> values of both."""
    old, new = (
        dict(knobs.leaves("", {**side.index.config, "train_state": dataclasses.asdict(side.index.train_state)}))
        | {"data fingerprint": side.index.data}
        for side in (a, b)
    )
    return {key: values for key in sorted(old | new) if (values := (old.get(key, ABSENT), new.get(key, ABSENT)))[0] != values[1]}


def _compare_weight(
    name: str, both: tuple[Summary, Summary], readers: tuple[Checkpoint, Checkpoint], result: CheckpointDifference, *, read: bool
) -> None:
    """Compare all kinds of a weight."""
    sides = [side.weights.get(name) for side in both]
    for kind in dict.fromkeys(kind for side in sides if side for kind in side.kinds):
        lacking = [which for which, side in zip("AB", sides, strict=True) if side is None or kind not in side.kinds]
        shapes = [side.shape for side in sides if side]
        if lacking:
            result.tensors.append(TensorDifference(name, kind, f"not in {lacking[0]}"))
        elif shapes[0] != shapes[1]:
            result.tensors.append(TensorDifference(name, kind, f"shape {list(shapes[0])} and {list(shapes[1])}"))
        elif not read and _is_stored_alike(name, kind, both):
            result.equal += 1
            result.by_digest += 1
        elif difference := tensor_difference(name, kind, readers[0].tensor(name, kind), readers[1].tensor(name, kind)):
            result.tensors.append(difference)
        else:
            result.equal += 1


def _is_stored_alike(name: str, kind: str, both: tuple[Summary, Summary]) -> bool:
    """Whether two tensors are divided alike and have the same checksums, which need not be read then."""
    known = {(e.digests.get(kind), e.dtypes[kind], e.block_bytes) for e in (side.index.tensors[name] for side in both)}
    if len(known) > 1 or None in next(iter(known)):  # format 1 has no digests of tensors
        return False
    with stored_runs.report_damage(both[0].path):
        places = [_places(side, name) for side in both]
    return places[0] == places[1]


def _places(side: Summary, name: str) -> list[tuple[Any, ...]]:
    """Box and run of each part of a weight."""
    entry = side.index.tensors[name]
    rows = parts.read_rows(side.path / native.PARTS, *entry.rows)
    return [(row["box_start"].tolist(), row["box_stop"].tolist(), int(row["start"]), int(row["count"])) for row in rows]


def tensor_difference(name: str, kind: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    """How two tensors of one shape differ; None if all elements are equal. NaN equals NaN."""
    differing, absolute, relative, squares, whole = 0, 0.0, 0.0, 0.0, 0.0
    for x, y in zip(a.reshape(-1).split(_CHUNK), b.reshape(-1).split(_CHUNK), strict=True):
        if x.dtype == y.dtype and torch.equal(x, y):
            whole += float(x.double().square().sum())
            continue
        x, y = x.double(), y.double()
        different = ~((x == y) | (x.isnan() & y.isnan()))
        whole += float(x.square().sum())
        x, y = x[different], y[different]
        if count := x.numel():
            gap = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            differing += count
            absolute = max(absolute, float(gap.max()))
            relative = max(relative, float((gap / torch.maximum(x.abs(), y.abs())).nan_to_num(nan=math.inf, posinf=math.inf).max()))
            squares += float(gap.square().sum())
    if not differing:
        return None
    norm = math.sqrt(squares / whole) if whole > 0 and math.isfinite(squares) else math.inf
    return TensorDifference(name, kind, "", differing, a.numel(), absolute, relative, norm)
