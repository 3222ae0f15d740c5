"""Tables, lists of names and counts in texts."""

from __future__ import annotations

import pytest

from pipeline.common.texts import count, first_names, table_lines


def test_cells_of_a_column_are_below_each_other() -> None:
    rows = [("run", "step", "why"), ("lr-1", "2,000", ""), ("a", "5", "stopped")]
    assert table_lines(rows) == ["run   step   why", "lr-1  2,000", "a     5      stopped"]
    assert table_lines(rows, right={1}) == ["run    step  why", "lr-1  2,000", "a         5  stopped"]


@pytest.mark.parametrize(
    "names, separators, text",
    [
        ([1, 2, 3], (), "1, 2, 3"),
        ([1, 2, 3, 4, 5], (), "1, 2, 3 and 2 more"),
        (["a", "b", "c", "d"], ("; ", "; and "), "a; b; c; and 1 more"),
    ],
)
def test_the_first_names_and_the_number_of_others(names: list[object], separators: tuple[str, ...], text: str) -> None:
    assert first_names(names, 3, *separators) == text


def test_a_number_has_its_noun() -> None:
    assert [count(number, "step") for number in (None, 0, 1, 2000)] == ["0 steps", "0 steps", "1 step", "2,000 steps"]
