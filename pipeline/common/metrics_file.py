"""Reads metrics.jsonl of a training run; training/metrics.py writes it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
#: Columns that together are the time from the first step of a start to its last one: none of them has a part of another.
SECONDS = ("seconds", "validation_seconds", "save_seconds")
#: Bytes that are read at a time.
_BLOCK = 1 << 18


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, without damaged ones; empty if there is no file."""
    return list(_from_the_end(run_dir))[::-1]


def last_with(run_dir: Path, name: str, count: int) -> list[dict[str, Any]]:
    """Return the last `count` lines of a run that have a metric, in order, without damaged ones; empty if there is no file."""
    return list(islice((line for line in _from_the_end(run_dir, f'"{name}"'.encode()) if name in line), count))[::-1]


def seconds_after(run_dir: Path, step: int) -> float:
    """Return the time of the steps after a step, with their validations and saves, seconds; 0 if there is no file."""
    later = takewhile(lambda line: line["step"] > step, _from_the_end(run_dir))
    return sum((line.get(name) or 0.0 for line in later for name in SECONDS), 0.0)


def _from_the_end(run_dir: Path, mark: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the lines that contain a text, the last one first, without damaged ones; the file is read as far as they are asked for."""
    path, rest = run_dir / FILE, b""
    if not path.is_file():
        return
    with open(path, "rb") as handle:
        begin = handle.seek(0, os.SEEK_END)
        while begin > 0:
            begin, end = max(begin - _BLOCK, 0), begin
            handle.seek(begin)
            rest, *lines = (handle.read(end - begin) + rest).split(b"\n")
            for line in reversed(lines if begin else [rest, *lines]):
                with suppress(ValueError):  # an interrupted run wrote a part of its last line
                    if mark in line and isinstance(content := json.loads(line), dict) and isinstance(content.get("step"), int):
                        yield content


def columns(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the numeric columns: name -> (step, value), without values that are missing or not finite.

    The scores of a corpus have its name before that of the score, as in the table of an evaluation: "de validation_loss".
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        corpora = line.get("corpora") or {}
        parts = {"": line, **{f"{name} ": scores for name, scores in corpora.items()}}
        for prefix, values in parts.items():
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                    points.setdefault(f"{prefix}{name}", []).append((line["step"], float(value)))
    return points
