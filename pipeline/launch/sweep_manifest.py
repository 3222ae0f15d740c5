"""The manifest of a sweep, SWEEP/sweep.json: its points with their numbers and settings, and the jobs that were submitted for them.

The id of a point is a hash of its settings, so a point keeps its number, which names its run directory, in whichever order and with
whichever further values the points are listed the next time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from pipeline.common.atomic_files import report_disk_full, write_json
from pipeline.common.errors import UserError, Violation
from pipeline.common.texts import first_names
from pipeline.report import run_files

#: In the folder of a sweep.
NAME = "sweep.json"
#: Points that a sentence names at most.
_NAMED = 20


@dataclass(frozen=True)
class SweepEntry:
    """A point of a sweep.

    Attributes:
        id: hash of the settings.
        number: of the point; the default name of its run directory.
        overrides: its settings, as on the command line.
        options: settings of its job, group cluster, that all points of a command have; they are not part of the id.
        job: the newest job; None for a point that was not submitted.
        log: the output of that job.
        outcome: of a run on this machine, "finished" or "failed: REASON"; "canceled" for a job that tools/sweep canceled; else empty.
    """

    id: str
    number: int
    run_dir: str
    overrides: tuple[str, ...]
    options: tuple[str, ...] = ()
    job: int | None = None
    log: str | None = None
    outcome: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """The settings for a person: without the plus signs of Hydra's grammar."""
        return tuple(override.lstrip("+") for override in self.overrides)


@dataclass(frozen=True)
class SweepManifest:
    """The points of a sweep.

    Attributes:
        entries: its points, by id.
        config_dirs: folders of --config-dir.
    """

    folder: Path
    entries: dict[str, SweepEntry]
    config_dirs: tuple[str, ...] = ()

    def number(self, point: str) -> int:
        """Return the number of a point by its id: its own, or the next one that is free."""
        if (entry := self.entries.get(point)) is not None:
            return entry.number
        return max((entry.number for entry in self.entries.values()), default=-1) + 1

    def with_point(self, entry: SweepEntry) -> SweepManifest:
        """Return the manifest with a point; one that it has keeps its job and outcome."""
        known = self.entries.get(entry.id)
        kept = entry if known is None else replace(entry, job=known.job, log=known.log, outcome=known.outcome)
        return replace(self, entries=self.entries | {entry.id: kept})

    def with_job(self, point: str, job: int, log: str) -> SweepManifest:
        """Return the manifest with the job that was submitted for a point."""
        return replace(self, entries=self.entries | {point: replace(self.entries[point], job=job, log=log, outcome="")})

    def with_outcome(self, point: str, outcome: str) -> SweepManifest:
        """Return the manifest with the outcome of a run on this machine."""
        return replace(self, entries=self.entries | {point: replace(self.entries[point], outcome=outcome)})

    def differing(self) -> dict[str, tuple[str, ...]]:
        """Return the settings that not all points have: id -> "key=value"."""
        common = set.intersection(*(set(entry.values) for entry in self.entries.values())) if len(self.entries) > 1 else set()
        return {entry.id: tuple(value for value in entry.values if value not in common) for entry in self.entries.values()}

    def other(self, run_dir: str, point: str) -> SweepEntry | None:
        """Return the point with a run directory, if it is another one; None if there is none."""
        return next((entry for entry in self.entries.values() if entry.run_dir == run_dir and entry.id != point), None)

    def write(self) -> None:
        """Write the manifest.

        Raises:
            UserError: the disk is full.
        """
        points = [asdict(entry) | {"run_dir": _stored(self.folder, entry.run_dir)} for entry in self.sorted()]
        content = {"config_dirs": self.config_dirs, "points": points}
        with report_disk_full(self.folder):
            write_json(self.folder / NAME, content)

    def sorted(self) -> list[SweepEntry]:
        """Return the points in the order of their numbers."""
        return sorted(self.entries.values(), key=lambda entry: entry.number)


def point_id(settings: Sequence[str]) -> str:
    """Return the id of a point: 8 hexadecimal digits that depend on its settings, not on their order."""
    return xxhash.xxh3_64_hexdigest("\n".join(sorted(settings)).encode())[:8]


def split(points: Sequence[Sequence[str]]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Split the overrides of the points of a command into those that make a point, and the options of its job.

    Args:
        points: the overrides of each point. The run directory is left out, and dry_run. Keys of the group cluster are options, unless the
            command sweeps over them.
    """
    common = set.intersection(*map(set, points)) if len(points) > 1 else {word for point in points for word in point}

    def is_option(word: str) -> bool:
        return word in common and re.match(r"\+*cluster[.=]", word) is not None

    divided = []
    for point in points:
        words = [word for word in point if not re.match(r"\+*(dry_run[.=]|run_dir=)", word)]
        divided.append((tuple(word for word in words if not is_option(word)), tuple(word for word in words if is_option(word))))
    return divided


def read(folder: Path) -> SweepManifest:
    """Read the manifest of a sweep; without one, it has no points.

    Raises:
        UserError: it is damaged, or was edited so that a point's settings are not those of its id.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = [_in_place(folder, entry) for entry in _entries(content)]
    except FileNotFoundError:
        return SweepManifest(folder, {})
    except (ValueError, KeyError, TypeError) as error:
        fix = "restore it, or choose another run_dir"
        raise UserError.of("run_dir", str(folder), f"has a {NAME} that cannot be read: {type(error).__name__}: {error}", fix) from error
    if len({entry.number for entry in entries}) < len(entries):
        raise UserError.of("run_dir", str(folder), f"has a {NAME} in which two points have one number", f"restore {path}")
    edited = [entry for entry in entries if entry.id != point_id(entry.overrides)]
    if edited:
        fix = f"restore {path}, or remove these points from it and start the sweep again"
        raise UserError(
            [
                Violation(f"point {e.number}", " ".join(e.overrides), f"has the id {e.id}, which is that of other settings", fix)
                for e in edited
            ]
        )
    folders = content.get("config_dirs", ()) if isinstance(content, dict) else ()
    return SweepManifest(folder, {entry.id: entry for entry in entries}, tuple(folders))


#: What a run directory in the folder of the sweep begins with in the manifest, so that the folder can be moved and copied.
_INSIDE = "./"


def _stored(folder: Path, run_dir: str) -> str:
    """A run directory as the manifest has it."""
    path = Path(run_dir)
    return _INSIDE + path.relative_to(folder).as_posix() if path.is_relative_to(folder) else run_dir


def _in_place(folder: Path, entry: SweepEntry) -> SweepEntry:
    """A point of the manifest in a folder. In a copy of the folder of a sweep, it has no job: that is the one of the original."""
    if not entry.run_dir.startswith(_INSIDE):
        return entry
    run_dir = folder / entry.run_dir.removeprefix(_INSIDE)
    is_copy = entry.log is not None and Path(entry.log).parent != run_dir.absolute()
    return replace(entry, run_dir=str(run_dir), job=None if is_copy else entry.job, log=None if is_copy else entry.log)


def _entries(content: Any) -> Iterator[SweepEntry]:
    """Yield the points of a manifest, also of one without ids and numbers, which earlier versions wrote."""
    for place, point in enumerate(content["points"] if isinstance(content, dict) else content):
        if "id" not in point:
            name = Path(point["run_dir"]).name
            settings, options = split([point["overrides"]])[0]
            number = int(name) if name.isdecimal() else place
            point |= {"id": point_id(settings), "number": number, "overrides": settings, "options": options}
        yield SweepEntry(**point | {"overrides": tuple(point["overrides"]), "options": tuple(point["options"])})


def not_begun(folder: Path) -> list[str]:
    """Return which points of the sweep in a folder have no run yet, or that its manifest is damaged, for a report of its runs.

    Empty if there is no such point, or no sweep.
    """
    try:
        entries = read(folder).sorted()
    except UserError as error:
        first = error.violations[0]
        return [f"{NAME}: {first.key}={first.value}: {first.rule}"]
    without = [entry for entry in entries if not run_files.is_run(folder / Path(entry.run_dir).name)]
    failed = [entry for entry in without if entry.outcome.startswith("failed")]
    waiting = [entry for entry in without if not entry.outcome]
    sentences = [f"point {entry.number} of {NAME} {entry.outcome}" for entry in failed[:_NAMED]]
    sentences += [f"{len(failed) - _NAMED} more points of {NAME} failed before they wrote a file"] if len(failed) > _NAMED else []
    if waiting:
        shown = first_names([entry.number for entry in waiting], _NAMED)
        sentences.append(f"points of {NAME} that have not begun: {shown}; tools/sweep status {folder} tells why")
    return sentences
