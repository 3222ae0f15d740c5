"""Reading runs of a checkpoint that was written in another division: exact, no more than is needed, and what is damaged is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from pipeline.checkpoint import data_file, native, read_plan
from pipeline.checkpoint.contents import read_contents
from pipeline.checkpoint.native import PARTS, Index, PartsEntry, TrainState
from pipeline.checkpoint.parts import Box, Part, block_bytes, overlap
from pipeline.checkpoint.reader import Checkpoint, WantedRun
from pipeline.checkpoint.records import merge, record_name, write_record
from pipeline.common.atomic_files import digest
from pipeline.common.errors import DamagedCheckpointError


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


def bytes_of(values: Tensor) -> bytes:
    return torch.empty(len(values), dtype=values.dtype).copy_(values).view(torch.uint8).numpy().tobytes()


@mock.patch.object(os, "fsync", new=int)  # does nothing: tests need no disk
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
                contents.append({kind: bytes_of(values_of(value, run)) for kind, value in weights[name].items()})

        def read(part: int, kind: str, contents: list[dict[str, bytes]] = contents) -> Iterator[memoryview]:
            yield memoryview(contents[part][kind])

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


def runs_of(weights: dict[str, dict[str, Tensor]], held: dict[str, list[list[Held]]], rank: int) -> list[WantedRun]:
    """What a rank of a layout wants, in fresh tensors."""
    runs = []
    for name, ranks in held.items():
        for h in ranks[rank] if rank < len(ranks) else ():
            fresh = {kind: torch.full((h.count,), torch.nan, dtype=full.dtype) for kind, full in weights[name].items()}
            runs.append(WantedRun(name, tuple(weights[name]["weight"].shape), h.box, h.start, fresh))
    return runs


def check(weights: dict[str, dict[str, Tensor]], runs: list[WantedRun]) -> None:
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
@settings(max_examples=40)
def test_any_division_is_read_exactly_into_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shapes = {f"w{n}": tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))) for n in range(data.draw(st.integers(1, 3)))}
    weights = {name: random_weight(shape, ("weight",) if name == "w2" else ("weight", "exp_avg")) for name, shape in shapes.items()}
    saved = {name: data.draw(divisions(shape)) for name, shape in shapes.items()}
    loaded = {name: data.draw(divisions(shape)) for name, shape in shapes.items()}
    block = 4 * data.draw(st.integers(1, 20))
    path = save(tmp_path_factory.mktemp("checkpoint") / "step-00000007", weights, saved, block)
    sizes = {name: data.draw(st.integers(0, 200)) for name in ("DIRECT", "GAP")}  # as if the weights were large
    with mock.patch.multiple(read_plan, **sizes, CHUNK=data.draw(st.integers(1, 200)), LIMIT=data.draw(st.sampled_from((1.0, 2.0)))):
        for rank in range(4):
            checkpoint = Checkpoint(path)
            runs = runs_of(weights, loaded, rank)
            checkpoint.read(runs)
            check(weights, runs)
            assert len(set(checkpoint.counters.opened)) == len(checkpoint.counters.opened), "each file is opened once"
        for name, kinds in weights.items():
            assert torch.equal(checkpoint.tensor(name), kinds["weight"])
            assert torch.equal(checkpoint.tensor(name, "exp_avg"), kinds.get("exp_avg", torch.zeros(shapes[name])))


SHAPE = (256, 512)
LAYOUTS = {
    "one rank": division(SHAPE, 0, 1, 1),
    "ZeRO on 4": division(SHAPE, 0, 1, 4),
    "ZeRO on 3": division(SHAPE, 0, 1, 3),
    "tensor 4, column": division(SHAPE, 0, 4, 1),
    "tensor 4, row": division(SHAPE, 1, 4, 1),
    "tensor 2, row, ZeRO on 4": division(SHAPE, 1, 2, 4),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights, saved in every layout."""
    folder = tmp_path_factory.mktemp("layouts")
    block = block_bytes(SHAPE, 1, 4)
    return {name: save(folder / f"layout {n}", WEIGHTS, {"w": held}, block) for n, (name, held) in enumerate(LAYOUTS.items())}


WEIGHTS = {"w": random_weight(SHAPE)}


def shared(a: Held, b: Held) -> bool:
    return len(overlap(a.box, (a.start, a.count), b.box, (b.start, b.count))[0]) > 0


#: Every layout as the first one, with itself and another one as the second; the other pairs are of the long tier.
NEXT = dict(pairwise([*LAYOUTS, "one rank"]))
PAIRS = [
    pytest.param(first, second, marks=() if second in (first, NEXT[first]) else pytest.mark.long) for first in LAYOUTS for second in LAYOUTS
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_rank_reads_what_it_needs_and_opens_what_it_uses(saved: dict[str, Path], first: str, second: str) -> None:
    for rank, wanted in enumerate(LAYOUTS[second]):
        checkpoint = Checkpoint(saved[first])
        runs = runs_of(WEIGHTS, {"w": LAYOUTS[second]}, rank)
        checkpoint.read(runs)
        check(WEIGHTS, runs)
        touched = [n for n, held in enumerate(LAYOUTS[first]) if any(shared(a, b) for a in held for b in wanted)]
        assert sorted(checkpoint.counters.opened) == [PARTS, *(f"rank-{n:05d}.safetensors" for n in touched)]
        assert checkpoint.counters.wanted == 8 * sum(held.count for held in wanted)
        assert checkpoint.counters.bytes <= 1.2 * checkpoint.counters.wanted
        if first == second:
            assert checkpoint.counters.calls <= 6, "parts.npy, the block digests, and long ranges"


def test_a_flipped_byte_names_weight_kind_elements_and_file(saved: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(saved["ZeRO on 4"], tmp_path / "copy")
    file = path / "rank-00002.safetensors"
    content = bytearray(file.read_bytes())
    where = content.index(values_of(WEIGHTS["w"]["exp_avg"], LAYOUTS["ZeRO on 4"][2][0]).numpy().tobytes())
    content[where + 4 * 1000] ^= 1
    file.write_bytes(content)
    for rank, affected in enumerate((False, False, True, False)):
        checkpoint, runs = Checkpoint(path), runs_of(WEIGHTS, {"w": LAYOUTS["tensor 4, column"]}, rank)
        if not affected:
            checkpoint.read(runs)
            check(WEIGHTS, runs)
            continue
        with pytest.raises(DamagedCheckpointError) as raised:
            checkpoint.read(runs)
        (violation,) = raised.value.violations
        assert violation.value == file
        first = 2 * 32768 + 1000 // 128 * 128  # blocks of 512 bytes
        assert f"exp_avg of w[0:256, 0:512], elements {first}:{first + 128}" in violation.rule
    with pytest.raises(DamagedCheckpointError, match=r"exp_avg of w\[0:256, 0:512\]"):
        checkpoint.tensor("w", "exp_avg")
    assert torch.equal(checkpoint.tensor("w"), WEIGHTS["w"]["weight"]), "the weight is not damaged"


def test_missing_and_short_files_and_damaged_rows_are_named(saved: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(saved["ZeRO on 4"], tmp_path / "copy")
    (path / "rank-00001.safetensors").unlink()
    with open(path / "rank-00003.safetensors", "r+b") as handle:
        handle.truncate(1000)
    checkpoint = Checkpoint(path)
    first = runs_of(WEIGHTS, {"w": LAYOUTS["ZeRO on 4"]}, 0)
    checkpoint.read(first)
    check(WEIGHTS, first)
    with pytest.raises(DamagedCheckpointError) as raised:
        checkpoint.tensor("w")
    missing, short = raised.value.violations
    assert missing.value == path / "rank-00001.safetensors"
    assert missing.rule == "No such file or directory: weight of w[0:256, 0:512], elements 32768:65536"
    assert short.rule.startswith("is truncated or overwritten: 1000 bytes, expected ")
    assert short.rule.endswith("weight of w[0:256, 0:512], elements 98304:131072")
    content = bytearray((path / PARTS).read_bytes())
    content[-1] ^= 1
    (path / PARTS).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="rows 0:4, which say where w is, differ from their checksum"):
        Checkpoint(path).tensor("w")


def test_missing_parts_and_other_weights_are_named(tmp_path: Path) -> None:
    held = division(SHAPE, 0, 1, 4)
    with pytest.raises(ValueError, match="w: its parts have 98304 of 131072 elements"):
        save(tmp_path / "lost", WEIGHTS, {"w": [held[0], held[1], held[3]]}, 512)
    path = save(tmp_path / "complete", WEIGHTS, {"w": held}, 512)
    index = native.read_index(path)
    rows = np.load(path / PARTS)
    rows["start"][1] += 100  # elements that two parts have, and some that no part has
    entry = replace(index.tensors["w"], rows_xxh3=xxhash.xxh3_64_hexdigest(rows.tobytes()))
    np.save(path / PARTS, rows)
    native.write_index(path, replace(index, tensors={"w": entry}))
    with pytest.raises(DamagedCheckpointError, match=r"weight of w\[0:256, 0:512\], elements 32768:32868 are in no part"):
        Checkpoint(path).tensor("w")
    values = {"weight": torch.zeros(6)}
    with pytest.raises(DamagedCheckpointError) as raised:
        Checkpoint(path).read([WantedRun("w", (2, 3), ((0, 2), (0, 3)), 0, values), WantedRun("v", (6,), ((0, 6),), 0, values)])
    assert [v.rule for v in raised.value.violations] == ["w has shape [256, 512], not [2, 3]", "does not contain the weight v"]


def test_other_dtypes_and_missing_moments(tmp_path: Path) -> None:
    weights = {"frozen": {"weight": torch.randn(40, 30).bfloat16()}, "trained": random_weight((50,))}
    path = save(tmp_path / "step", weights, {"frozen": division((40, 30), 1, 2, 1), "trained": division((50,), 0, 1, 2)}, 512)
    checkpoint = Checkpoint(path)
    assert torch.equal(checkpoint.tensor("frozen"), weights["frozen"]["weight"].float())
    found = checkpoint.ranges("frozen", "weight", ((3, 9), (5, 25)), (7, 50))
    assert torch.equal(found, weights["frozen"]["weight"][3:9, 5:25].flatten()[7:57])
    assert not checkpoint.tensor("frozen", "exp_avg").any()
    half = torch.full((50,), torch.nan, dtype=torch.bfloat16)
    zero = torch.full((50,), torch.nan)
    checkpoint.read([WantedRun("trained", (50,), ((0, 50),), 0, {"weight": half, "exp_avg_sq": zero})])
    assert torch.equal(half, weights["trained"]["weight"].bfloat16())
    assert not zero.any()


def save_format_1(folder: Path, held: list[list[Held]]) -> Path:
    """Write the weight "w" as earlier versions did: fragments in files whose headers describe them, and an index without weights."""
    folder.mkdir()
    files = {}
    for rank, (run,) in enumerate(held):
        path = folder / f"rank-{rank:05d}.safetensors"
        cuts = [["tensor", dim, *side] for dim, side in enumerate(run.box) if side != (0, SHAPE[dim])]
        geometry = {"w": {"shape": SHAPE, "cuts": cuts, "run": [run.start, run.count]}}
        tensors = {f"{kind}/w": values_of(full, run).clone() for kind, full in WEIGHTS["w"].items()}
        save_file(tensors, path, metadata={"fragments": json.dumps(geometry)})
        files[path.name] = {"bytes": path.stat().st_size, "xxh3": digest(path)}
    content = {"train_state": {"step": 3}, "config": {}, "data": "", "files": files, "kinds": ["weight", "exp_avg"]}
    (folder / "index.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("first", ["ZeRO on 3", "tensor 4, row"])
def test_a_checkpoint_of_format_1_is_read_through_the_same_interface(tmp_path: Path, first: str) -> None:
    path = save_format_1(tmp_path / "step-00000003", LAYOUTS[first])
    assert Checkpoint(path).step == 3
    assert Checkpoint(path).names() == ["w"]
    contents = read_contents(path)
    for second in LAYOUTS.values():
        for rank, wanted in enumerate(second):
            checkpoint, runs = Checkpoint(path, contents), runs_of(WEIGHTS, {"w": second}, rank)
            checkpoint.read(runs)
            check(WEIGHTS, runs)
            touched = [n for n, held in enumerate(LAYOUTS[first]) if any(shared(a, b) for a in held for b in wanted)]
            assert checkpoint.counters.opened == [f"rank-{n:05d}.safetensors" for n in touched]
    assert torch.equal(checkpoint.tensor("w", "exp_avg"), WEIGHTS["w"]["exp_avg"])
    assert not checkpoint.tensor("w", "exp_avg_sq").any()


def test_a_damaged_file_of_format_1_is_named_if_it_is_used(tmp_path: Path) -> None:
    path = save_format_1(tmp_path / "step-00000003", LAYOUTS["ZeRO on 4"])
    file = path / "rank-00003.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    checkpoint = Checkpoint(path)
    checkpoint.read(runs_of(WEIGHTS, {"w": LAYOUTS["ZeRO on 4"]}, 0))
    with pytest.raises(DamagedCheckpointError) as raised:
        checkpoint.read(runs_of(WEIGHTS, {"w": LAYOUTS["ZeRO on 4"]}, 3))
    assert [v.value for v in raised.value.violations] == [file, file]
    assert "exp_avg of w[0:256, 0:512], elements 98304:131072" in str(raised.value)
    file.write_bytes(b"?" * len(content))
    with pytest.raises(DamagedCheckpointError, match=r"rank-00003.safetensors: is not readable: its header is damaged"):
        Checkpoint(path)
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"rank-00003.safetensors: is missing"):
        Checkpoint(path)
