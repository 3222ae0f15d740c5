"""Resuming an interrupted stage: `.unfinished/` in the output folder holds one completion record per finished part."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pipeline.common import artifact
from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.common.locks import claimed
from pipeline.common.mpi import Comm
from pipeline.common.remote import RemotePath

log = logging.getLogger("pipeline")

Folder = TypeVar("Folder", bound=Path | RemotePath)


class Unfinished(Generic[Folder]):
    """Completion records of finished parts, and the settings that they were written with.

    Args:
        settings: all settings that determine the output, as in the manifest.
        resume: further settings that must not change until the run is finished, because finished parts depend on them.
    """

    def __init__(self, folder: Folder, settings: dict[str, Any], resume: dict[str, Any] | None = None) -> None:
        self.output = folder
        self.folder: Folder = folder / ".unfinished"  # type: ignore[assignment] # of the same class
        self.settings = json.loads(json.dumps(settings))
        self._recorded = {**self.settings, **(resume or {})}

    def take_over(self, key: str, outputs: Sequence[str]) -> None:
        """Continue the interrupted run of these settings, or begin a run. Nothing of another run is removed. The caller holds the lock.

        Args:
            key: configuration key of the folder.
            outputs: glob patterns of the files that the stage writes.

        Raises:
            UserError: the folder holds the unfinished run of other settings, or files that a run would overwrite.
        """
        if (self.output / artifact.MANIFEST).is_file():
            return  # another job has completed the folder since this one looked
        if self.note("settings") is not None:
            self.check_settings(key)
            for partial in self.output.glob(".*.[0-9]*.partial") if isinstance(self.output, Path) else ():  # of atomic_file
                partial.unlink()
            return
        found = self.output.sizes() if isinstance(self.output, RemotePath) else [path.name for path in self.output.glob("*")]
        if existing := sorted(name for name in found if any(fnmatchcase(name, pattern) for pattern in outputs)):
            rule = f"contains files of another run or program: {', '.join(existing[:5])}{', ...' if len(existing) > 5 else ''}"
            raise UserError.of(key, self.output, rule, f"set {key} to another folder, or move these files away")
        self.clear()  # what remains of records whose removal was interrupted
        self.write("settings", self._recorded)

    def check_settings(self, key: str) -> None:
        """Compare the settings with those of the unfinished run in the folder.

        Raises:
            UserError: they differ; lists every difference.
        """
        fix = f"run it with those settings to continue, set {key} to another folder, or remove {self.output} to discard the unfinished run"
        artifact.check_settings(self.note("settings") or {}, self._recorded, f"{self.output} holds an unfinished run with", fix)

    def note(self, name: str) -> Any:
        """Return the completion record of a part, None if the part is not finished."""
        try:
            return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def finished(self, name: str) -> bool:
        """Whether there is the completion record of a part, which is not read."""
        return (self.folder / f"{name}.json").is_file()

    def write(self, name: str, note: Any) -> None:
        """Write the completion record of a part."""
        with atomic_file(self.folder / f"{name}.json", "w") as handle:
            json.dump(note, handle)

    def remove(self, name: str, suffixes: Sequence[str]) -> None:
        """Delete the files of a finished part, which are many in a large run: every rank removes its own before `clear`."""
        assert isinstance(self.folder, Path)
        for suffix in (*suffixes, ".json"):
            (self.folder / f"{name}{suffix}").unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all completion records; the stage is finished."""
        if isinstance(self.folder, RemotePath):
            self.folder.remove()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def work(
    comm: Comm,
    folder: Folder,
    made_as: tuple[str, str],
    settings: dict[str, Any],
    summary: Callable[[dict[str, Any]], str],
    outputs: Sequence[str],
    *,
    resume: dict[str, Any] | None = None,
    array: str | None = None,
) -> Iterator[Unfinished[Folder] | None]:
    """Guard the work of a stage on its output folder: one job at a time, only missing parts, nothing when the folder is complete.

    A URL has no lock: two jobs of the same settings write the same objects.

    Args:
        made_as: the configuration key of the folder, and the stage in its manifest.
        settings: all settings that determine the output.
        summary: formats the totals of a finished folder for the log.
        outputs: glob patterns of the files that the stage writes into the folder.
        resume: further settings that must not change until the run is finished.
        array: the job array whose tasks share the work.

    Yields:
        The completion records; None when the folder is complete.

    Raises:
        UserError: the folder was written with other settings, holds files of another run, or another job is writing it.
    """
    unfinished, (key, stage) = Unfinished(folder, settings, resume), made_as
    done = artifact.find_complete(folder, key=key, stage=stage, settings=settings) if comm.rank == 0 else None
    if done:
        log.info("%s=%s is complete, nothing to do (%s)", key, folder, summary(done.totals))
    if comm.bcast(done is not None):
        yield None
        return
    prepare = partial(unfinished.take_over, key, outputs)
    if comm.rank == 0 and isinstance(folder, RemotePath):
        prepare()
    with claimed(folder, key, array, prepare) if comm.rank == 0 and isinstance(folder, Path) else nullcontext():
        if comm.rank == 0:
            done = artifact.find_complete(folder, key=key, stage=stage, settings=settings)
            if not done:
                unfinished.check_settings(key)  # a further task of an array joins without preparing the folder
        if comm.bcast(done is not None):
            yield None
            return
        yield unfinished
