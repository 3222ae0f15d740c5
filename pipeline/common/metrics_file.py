"""Reads metrics.jsonl of a training run; training/metrics.py writes it."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
#: Columns that together are the time from the first step of a start to its last one: none of them has a part of another.
SECONDS = ("seconds", "validation_seconds", "save_seconds")


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, without damaged ones; empty if there is no file."""
    path = run_dir / FILE
    lines: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            content = json.loads(line)
        except ValueError:  # an interrupted run wrote a part of its last line
            continue
        if isinstance(content, dict) and isinstance(content.get("step"), int):
            lines.append(content)
    return lines


def last_with(run_dir: Path, name: str, count: int) -> list[dict[str, Any]]:
    """Return the last `count` lines of a run that have a metric, in order, without damaged ones; empty if there is no file."""
    path, mark = run_dir / FILE, f'"{name}"'.encode()
    lines: list[dict[str, Any]] = []
    for line in reversed(path.read_bytes().splitlines() if path.is_file() else []):
        if len(lines) == count:
            break
        with suppress(ValueError):
            if mark in line and isinstance(content := json.loads(line), dict) and name in content:
                lines.append(content)
    return lines[::-1]


def seconds_after(run_dir: Path, step: int) -> float:
    """Return the time of the steps after a step, with their validations and saves, seconds; 0 if there is no file."""
    path, seconds = run_dir / FILE, 0.0
    for line in reversed(path.read_bytes().splitlines() if path.is_file() else []):
        with suppress(ValueError, KeyError, TypeError):
            content = json.loads(line)
            if content["step"] <= step:
                break
            seconds += sum(content.get(name, 0.0) for name in SECONDS)
    return seconds


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
