"""Reads the files of a run directory by their names; damaged lines are left out and named. Nothing below checkpoints/ is read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeGuard

import yaml  # type: ignore[import-untyped] # PyYAML has no types

from pipeline.common import events, metrics_file
from pipeline.common.artifact import MANIFEST

CONFIG = "config.yaml"
#: A folder with one of these is a run directory.
OF_A_RUN = (events.FILE, metrics_file.FILE)
#: Bytes at the end of metrics.jsonl that are read, and those before them that are searched for a validation: about 200 and 10,000 steps.
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 22
#: In a line of metrics.jsonl, tells that it is that of a validation.
_VALIDATION = b'"validation_loss"'
#: Sections of config.yaml that are read for all runs.
_SECTIONS = ("stage", "training")


@dataclass(frozen=True)
class Lines:
    """Lines of a JSON Lines file.

    Attributes:
        content: the objects, in the order of their lines.
        problems: one sentence for each kind of damage.
    """

    content: list[dict[str, Any]] = field(default_factory=list)
    problems: tuple[str, ...] = ()


def is_run(folder: Path) -> bool:
    """Return whether a folder is the run directory of a training run."""
    return any((folder / name).is_file() for name in OF_A_RUN)


def read_events(run_dir: Path) -> Lines:
    """Return the events, in the order of their lines."""
    content, problems = _content(run_dir / events.FILE)

    def is_event(line: dict[str, Any]) -> bool:
        return isinstance(line.get("event"), str) and _is_number(line.get("time"))

    return _parsed(events.FILE, content, is_event, problems)


def read_metrics(run_dir: Path) -> Lines:
    """Return all lines of metrics.jsonl."""
    return _metrics(*_content(run_dir / metrics_file.FILE))


def read_last_metrics(run_dir: Path, *, validations: bool) -> Lines:
    """Return the lines in the last FIRST_BYTES of metrics.jsonl.

    Args:
        validations: before them, return the last validation, if it is within MOST_BYTES and not among them.
    """
    try:
        with open(run_dir / metrics_file.FILE, "rb") as handle:
            begin = max(os.fstat(handle.fileno()).st_size - FIRST_BYTES, 0)
            handle.seek(begin)
            text = handle.read()
            if begin:  # the first line is cut
                cut, _, text = text.partition(b"\n")
                begin += len(cut) + 1
            if validations and _VALIDATION not in text:
                text = _last_validation(handle, begin) + text
    except FileNotFoundError:
        return Lines()
    except OSError as error:
        return Lines(problems=(_unreadable(metrics_file.FILE, error),))
    return _metrics(text)


def _last_validation(handle: IO[bytes], end: int) -> bytes:
    """The line of the last validation before a place in a file; empty if there is none in the MOST_BYTES before it."""
    size = FIRST_BYTES
    while end > 0 and size < MOST_BYTES:
        size = min(4 * size, MOST_BYTES)
        handle.seek(max(end - size, 0))
        text = handle.read(min(size, end))
        if (place := text.rfind(_VALIDATION)) >= 0 and (first := text.rfind(b"\n", 0, place)) >= 0:
            return text[first + 1 : text.index(b"\n", place) + 1]
        if size >= end:
            return text[: text.index(b"\n", place) + 1] if place >= 0 else b""
    return b""


def changed(run_dir: Path, name: str) -> float | None:
    """Return when a file was last written, seconds since 1970; None if it does not exist."""
    try:
        return (run_dir / name).stat().st_mtime
    except OSError:
        return None


def read_config(run_dir: Path, *, whole: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the resolved configuration as nested dictionaries, and what is wrong with the file.

    Args:
        whole: all sections; otherwise those that every run needs, which takes a fifth of the time.
    """
    raw, problems = _content(run_dir / CONFIG)
    text = raw.decode(errors="replace")
    if not whole:
        text = "".join(re.findall(rf"^(?:{'|'.join(_SECTIONS)}):\n(?:[ -].*\n?)*", text, re.MULTILINE))
    try:
        content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        return {}, (f"{CONFIG} is damaged: {' '.join(str(error).split())[:120]}",)
    if content is None and not text:
        return {}, problems
    return (content, ()) if isinstance(content, dict) else ({}, (f"{CONFIG} is damaged: it is no mapping",))


def read_manifest(run_dir: Path) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the manifest of a completed run, None if there is none, and what is wrong with the file."""
    text, problems = _content(run_dir / MANIFEST)
    if not text:
        return None, problems
    try:
        content = json.loads(text)
        return {**content, "totals": dict(content["totals"])}, ()
    except (ValueError, TypeError, KeyError):
        return None, (f"{MANIFEST} is damaged, or no stage wrote it",)


def _content(path: Path) -> tuple[bytes, tuple[str, ...]]:
    """The content of a file, empty if there is none; and why it cannot be read."""
    try:
        return path.read_bytes(), ()
    except (FileNotFoundError, NotADirectoryError):
        return b"", ()
    except OSError as error:
        return b"", (_unreadable(path.name, error),)


def _unreadable(name: str, error: OSError) -> str:
    return f"{name} cannot be read: {error.strerror}"


def _metrics(text: bytes, problems: tuple[str, ...] = ()) -> Lines:
    return _parsed(metrics_file.FILE, text, lambda line: isinstance(line.get("step"), int), problems)


def _parsed(name: str, text: bytes, is_valid: Callable[[dict[str, Any]], bool], problems: tuple[str, ...]) -> Lines:
    """The objects of lines, and the numbers of those that are none, counted from the last line."""
    content, damaged = [], []
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in zip(range(len(lines), 0, -1), lines, strict=True):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict) and is_valid(parsed):
            content.append(parsed)
        else:
            damaged.append(number)
    if damaged == [1]:
        problems = (*problems, f"{name}: the last line is incomplete")
    elif damaged:
        lines_text = "1 line is" if len(damaged) == 1 else f"{len(damaged)} lines are"
        problems = (*problems, f"{name}: {lines_text} damaged; the last one is line {damaged[-1]} from the end")
    return Lines(content, problems)


def _is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return _is_number(value) and math.isfinite(value)
