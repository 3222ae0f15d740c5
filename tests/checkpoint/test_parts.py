"""The arithmetic of boxes, runs and blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint import parts
from pipeline.checkpoint.parts import Box


@st.composite
def shapes_with_two_runs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Box, tuple[int, int]]]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    runs = []
    for _ in range(2):
        corners = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        box = tuple((first, last) for first, last in corners)
        elements = int(np.prod([last - first for first, last in box]))
        start = draw(st.integers(0, elements))
        runs.append((box, (start, draw(st.integers(0, elements - start)))))
    return shape, runs


def elements_of(shape: tuple[int, ...], box: Box, run: tuple[int, int]) -> np.ndarray:
    """The numbers of the elements of a run in the flattened full weight."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)[tuple(slice(*sides) for sides in box)]
    return np.reshape(numbers, -1)[run[0] : run[0] + run[1]]


@given(shapes_with_two_runs())
def test_stretches_are_the_common_elements(case: tuple[tuple[int, ...], list[tuple[Box, tuple[int, int]]]]) -> None:
    shape, ((box, run), (other_box, other_run)) = case
    mine, other = elements_of(shape, box, run), elements_of(shape, other_box, other_run)
    starts, other_starts, counts = parts.overlap(box, run, other_box, other_run)
    indices = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    other_indices = [start + i for start, count in zip(other_starts, counts, strict=True) for i in range(count)]
    assert (counts > 0).all()
    assert mine[indices].tolist() == other[other_indices].tolist()
    assert mine[indices].tolist() == np.intersect1d(mine, other).tolist(), "ascending, each once"


def test_stretches_are_as_long_as_they_can_be() -> None:
    full = ((0, 8), (0, 4))
    assert [s.tolist() for s in parts.overlap(full, (0, 32), full, (3, 20))] == [[3], [0], [20]], "whole rows in both: one stretch"
    assert [s.tolist() for s in parts.overlap(full, (0, 32), ((2, 4), (1, 3)), (0, 4))] == [[9, 13], [0, 2], [2, 2]]
    stack = ((0, 2), (0, 3), (0, 5))
    assert [s.tolist() for s in parts.overlap(stack, (0, 30), ((0, 2), (1, 3), (0, 5)), (0, 20))] == [[5, 20], [0, 10], [10, 10]]


@pytest.mark.parametrize(
    ("shape", "sliced_dim", "expected"),
    [
        ((1 << 10, 1 << 20), 0, 32 << 10),  # whole rows are read
        ((8192, 1024), 0, 32768),  # a 1024th of the weight, so that the ends of a run add little
        ((100,), 0, 512),
        ((8192, 28672), 1, 7168),  # a sixteenth of a row
        ((64, 128), 1, 512),
        ((8, 1 << 26), 1, 32 << 10),
        ((16, 4096, 14336), 1, 32 << 10),  # experts whose outputs are sliced: whole rows again
        ((16, 4096, 32768), 2, 8192),
        ((40000, 30001), 1, 7500),  # whole elements
    ],
)
def test_blocks_do_not_exceed_what_a_slice_reads(shape: tuple[int, ...], sliced_dim: int, expected: int) -> None:
    assert parts.block_bytes(shape, sliced_dim, 4) == expected


def test_rows_are_sorted_and_read_by_range(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = np.zeros(200, parts.row_dtype(3))
    rows["tensor"], rows["start"] = rng.integers(0, 5, 200), rng.integers(0, 3, 200)
    rows["box_start"], rows["count"] = rng.integers(0, 2, (200, 3)), np.arange(200)
    rows = parts.sort_rows(rows)
    keys = [(int(r["tensor"]), *r["box_start"].tolist(), *r["box_stop"].tolist(), int(r["start"])) for r in rows]
    assert keys == sorted(keys)
    np.save(tmp_path / "parts.npy", rows)
    assert (parts.read_rows(tmp_path / "parts.npy", 50, 60) == rows[50:60]).all()
    assert (parts.read_rows(tmp_path / "parts.npy") == rows).all()
    with open(tmp_path / "parts.npy", "r+b") as handle:
        handle.truncate(1000)
    with pytest.raises(ValueError, match="ends before row 60"):
        parts.read_rows(tmp_path / "parts.npy", 50, 60)
