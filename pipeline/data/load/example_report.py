"""What was found in files of examples: unusable lines, formats, keys that are not used, and lines that are too long."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.common import json_lines
from pipeline.common.atomic_files import atomic_file, make_folder
from pipeline.common.errors import UserError
from pipeline.data.load.example_parts import PartNotes
from pipeline.data.load.prompts_and_answers import ExampleReader
from pipeline.data.tokenize.tokenizer import warn_of_spelled

log = logging.getLogger("pipeline")

#: Maximum number of unusable lines that the log and messages list.
_SHOWN = 10


@dataclass(frozen=True)
class _Unusable:
    """A line that is not used, and why."""

    path: str
    line: int
    error: str
    left_out: bool

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.error}"


def check(
    parts: Sequence[PartNotes], reader: type[ExampleReader], *, key: str, limit: float, length: int, tokens: int, folder: Path | None
) -> str:
    """Refuse files with too many unusable lines, and log what else was found.

    Args:
        parts: the notes of all parts of the files of a key, in order.
        reader: of their lines.
        key: configuration key that lists the files.
        limit: maximum fraction of the lines that are unusable (data.quarantine_limit).
        length: training.sequence_length.
        tokens: of all examples.
        folder: gets the list of all unusable lines; what was read is logged. None: neither.

    Returns:
        What the sequence length changed, for the fingerprint; empty if nothing.

    Raises:
        UserError: a file has records of several formats, none are usable, or too many are not; the message names lines with reasons.
    """
    bad = _numbered(parts)
    formats, ignored = _added([notes.formats for notes in parts]), _added([notes.ignored for notes in parts])
    spelled = _added([notes.spelled for notes in parts])
    for path, found in formats.items():
        if len(found) > 1:
            listed = ", ".join(f"{count:,} {name}" for name, count in found.most_common())
            raise UserError.of(key, path, f"has records of several formats: {listed}", "write a file for each format")
        if folder is not None:
            _log_notes(key, path, found, ignored[path])
            warn_of_spelled(f"{key}: {path}", spelled.get(path, {}))
    list_path = _write_list(folder, key, bad) if folder is not None else None
    unusable, usable = [line for line in bad if not line.left_out], sum(notes.usable for notes in parts)
    left_out, cut, cut_tokens = len(bad) - len(unusable), sum(notes.cut for notes in parts), sum(notes.cut_tokens for notes in parts)
    shown = "; ".join(map(str, unusable[:_SHOWN])) + (f"; and {len(unusable) - _SHOWN} more" if len(unusable) > _SHOWN else "")
    all_of_them = f" ({list_path} lists all)" if list_path is not None else ""
    paths, lines = ", ".join(formats), usable + len(bad)
    if len(unusable) > limit * lines:
        rule = f"{len(unusable):,} of {lines:,} lines are unusable: {shown}{all_of_them}"
        raise UserError.of(key, paths, rule, f"correct them, or raise data.quarantine_limit={limit:g} to skip them")
    if not usable:
        fix = f"raise training.sequence_length={length}" if left_out else f"write lines such as {reader.example_line}"
        rule = f"has no usable lines: all are too long{all_of_them}" if left_out else "has no usable lines"
        raise UserError.of(key, paths, rule, fix)
    if folder is not None and unusable:
        log.warning("%s: skipped %d unusable lines: %s%s", key, len(unusable), shown, all_of_them)
    changed = f" {cut} cut, {left_out} left out" if cut or left_out else ""
    if folder is not None and changed:
        share = 100 * cut_tokens / (cut_tokens + tokens)
        counted = f"{cut:,} are cut ({share:.1f} % of the tokens), and {left_out:,} are left out"
        text = "%s: training.sequence_length=%d is too short for %s of %s lines (data.instructions.too_long): %s"
        log.warning(text, key, length, f"{cut + left_out:,}", f"{lines:,}", counted)
    return changed


def _numbered(parts: Sequence[PartNotes]) -> list[_Unusable]:
    """The lines that are not used, with their numbers in the files."""
    before: Counter[str] = Counter()
    found = []
    for notes in parts:
        found += [_Unusable(path, before[path] + line, error, left_out) for path, line, error, left_out in notes.unusable]
        before.update(notes.lines)
    return found


def _added(parts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, Counter[str]]:
    """The sums of counts over parts, by file."""
    sums: dict[str, Counter[str]] = {}
    for part in parts:
        for path, counts in part.items():
            sums.setdefault(path, Counter()).update(counts)
    return sums


def _log_notes(key: str, path: str, formats: Counter[str], ignored: Counter[str]) -> None:
    """Log the format of a file, and the keys that are not used."""
    for name, count in formats.items():
        log.info("%s: %s: %s lines of the format: %s", key, path, f"{count:,}", name)
    if repaired := ignored.pop("messages.repaired", 0):
        log.info("%s: %s: %s chats are repaired (data.instructions.repair)", key, path, f"{repaired:,}")
    if ignored:
        found = ", ".join(f"{name} ({count:,})" for name, count in ignored.most_common())
        log.info("%s: %s: these keys are not used: %s", key, path, found)


def _write_list(folder: Path, key: str, bad: Sequence[_Unusable]) -> Path | None:
    """Write all lines that are not used to a file of the folder, and return its path; None, and no file, without such lines."""
    path = folder / f"unusable-{key.rpartition('.')[2]}.jsonl"
    if not bad:
        path.unlink(missing_ok=True)
        return None
    make_folder(folder)
    with atomic_file(path, "w") as handle:
        for line in bad:
            handle.write(json_lines.dump({"file": line.path, "line": line.line, "error": line.error}) + "\n")
    return path
