"""Texts for terminals, logs and messages: rows in columns, the first names of many, and numbers with their noun."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from typing import TypeVar

Item = TypeVar("Item", bound=Sized)


def table_lines(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows as the lines of a table, with the cells of a column below each other.

    Args:
        rows: all with the same number of cells.
        right: the columns that are aligned to the right, by number.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.rjust(width) if number in right else cell.ljust(width) for number, (cell, width) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return lines


def first_names(names: Sequence[object], most: int, separator: str = ", ", last: str = " and ") -> str:
    """Return the first names, and how many there are more: "a, b and 3 more".

    Args:
        most: how many are named.
        last: between the last name and the number of the others.
    """
    named = separator.join(map(str, names[:most]))
    return f"{named}{last}{len(names) - most} more" if len(names) > most else named


def in_batches(texts: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield texts, or arrays, in batches, each of which ends with the one that reaches a size."""
    batch: list[Item] = []
    collected = 0
    for text in texts:
        batch.append(text)
        collected += len(text)
        if collected >= size:
            yield batch
            batch, collected = [], 0
    if batch:
        yield batch


def count(number: int | None, noun: str) -> str:
    """Return a number with its noun: "1 step", "2,000 steps"."""
    return f"1 {noun}" if number == 1 else f"{number or 0:,} {noun}s"
