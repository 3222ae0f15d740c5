"""Reading runs of a checkpoint that was written in another division: exact, no more than is needed, and what is damaged is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.checkpoint import data_file, native, read_plan
from pipeline.checkpoint.native import PARTS, Index, PartsEntry, TrainState
from pipeline.checkpoint.parts import Box, Part
from pipeline.checkpoint.reader import Checkpoint, Run
from pipeline.checkpoint.records import merge, record_name, write_record

KINDS = {"weight": "F32", "exp_avg": "F32"}


@dataclass(frozen=True)
class Held:
    """A run that a rank of a layout holds: box, first element, and number of elements."""

    box: Box
    start: int
    count: int


def division(shape: Sequence[int], dim: int, boxes: int, ranks: int) -> list[list[Held]]:
    """The runs of a weight by rank: slices along a dim, each divided into a run for each of `ranks` ranks."""
    held = []
    for edges in np.array_split(np.arange(shape[dim]), boxes):
        box = tuple((int(edges[0]), int(edges[-1]) + 1) if d == dim else (0, size) for d, size in enumerate(shape))
        elements = int(np.prod([last - first for first, last in box]))
        ends = np.linspace(0, elements, ranks + 1).astype(int).tolist()
        held += [[Held(box, first, last - first)] for first, last in pairwise(ends)]
    return held


def values_of(full: Tensor, held: Held) -> Tensor:
    return full[tuple(slice(*side) for side in held.box)].flatten()[held.start : held.start + held.count]


def save(folder: Path, weights: dict[str, dict[str, Tensor]], held: dict[str, list[list[Held]]], block: int) -> Path:
    """Write a checkpoint with a file for each rank that holds something."""
    folder.mkdir()
    for rank in range(writers := max(len(ranks) for ranks in held.values())):
        parts, contents = [], []
        for name, ranks in held.items():
            for run in ranks[rank] if rank < len(ranks) else ():
                kinds = {kind: "BF16" if full.dtype == torch.bfloat16 else "F32" for kind, full in weights[name].items()}
                full = weights[name]["weight"]
                parts.append(Part(name, tuple(full.shape), run.box, run.start, run.count, block, kinds))
                contents.append({kind: values_of(value, run).contiguous().numpy() for kind, value in weights[name].items()})

        def read(part: int, kind: str, contents: list[dict[str, np.ndarray]] = contents) -> Iterator[memoryview]:
            yield memoryview(contents[part][kind].tobytes())

        files = [data_file.write(folder / f"rank-{rank:05d}.safetensors", parts, read)] if parts else []
        write_record(folder, rank, files)
    merged = merge(folder, writers)
    np.save(folder / PARTS, merged.rows)
    native.write_index(
        folder, Index(TrainState(7), {}, kinds=merged.kinds, files=merged.files, tensors=merged.tensors, parts=PartsEntry(0, ""))
    )
    for rank in range(writers):
        (folder / record_name(rank)).unlink()
    return folder


def runs_of(weights: dict[str, dict[str, Tensor]], held: dict[str, list[list[Held]]], rank: int) -> list[Run]:
    """What a rank of a layout wants, in fresh tensors."""
    runs = []
    for name, ranks in held.items():
        for h in ranks[rank] if rank < len(ranks) else ():
            fresh = {kind: torch.full((h.count,), torch.nan, dtype=full.dtype) for kind, full in weights[name].items()}
            runs.append(Run(name, tuple(weights[name]["weight"].shape), h.box, h.start, fresh))
    return runs


def check(weights: dict[str, dict[str, Tensor]], runs: list[Run]) -> None:
    for run in runs:
        for kind, values in run.tensors.items():
            held = Held(run.box, run.start, values.numel())
            assert torch.equal(values, values_of(weights[run.name][kind], held)), (run.name, kind, held)


def random_weight(shape: Sequence[int], kinds: Sequence[str] = ("weight", "exp_avg")) -> dict[str, Tensor]:
    return {kind: torch.randn(*shape) for kind in kinds}


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[Held]]:
    """A division of a weight into slices along one or two dims, each of which several ranks hold runs of, in any order."""
    sides: list[list[tuple[int, int]]] = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
        sides.append(list(zip([0, *cuts], [*cuts, size], strict=True)))
    boxes: list[Box] = [()]
    for side in sides:
        boxes = [(*box, part) for box in boxes for part in side]
    held = []
    for box in boxes:
        elements = int(np.prod([last - first for first, last in box]))
        cuts = sorted(draw(st.sets(st.integers(1, elements - 1), max_size=3))) if elements > 1 else []
        held += [Held(box, a, b - a) for a, b in zip([0, *cuts], [*cuts, elements], strict=True)]
    ranks: list[list[Held]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for run in held:
        ranks[draw(st.integers(0, len(ranks) - 1))].append(run)
    return ranks


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_division_is_read_exactly_into_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shapes = {f"w{n}": tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))) for n in range(data.draw(st.integers(1, 3)))}
    weights = {name: random_weight(shape, ("weight",) if name == "w2" else ("weight", "exp_avg")) for name, shape in shapes.items()}
    saved = {name: data.draw(divisions(shape)) for name, shape in shapes.items()}
    loaded = {name: data.draw(divisions(shape)) for name, shape in shapes.items()}
    block = 4 * data.draw(st.integers(1, 20))
    path = save(tmp_path_factory.mktemp("checkpoint") / "step-00000007", weights, saved, block)
    sizes = {name: data.draw(st.integers(0, 200)) for name in ("CHUNK", "DIRECT", "GAP")}  # as if the weights were large
    with mock.patch.multiple(read_plan, **sizes, LIMIT=data.draw(st.sampled_from((1.0, 2.0)))):
        for rank in range(4):
            checkpoint = Checkpoint(path)
            runs = runs_of(weights, loaded, rank)
            checkpoint.read(runs)
            check(weights, runs)
            assert len(set(checkpoint.counters.opened)) == len(checkpoint.counters.opened), "each file is opened once"
        for name, kinds in weights.items():
            assert torch.equal(checkpoint.tensor(name), kinds["weight"])
            assert torch.equal(checkpoint.tensor(name, "exp_avg"), kinds.get("exp_avg", torch.zeros(shapes[name])))
