"""A checkpoint becomes complete: its writers' records are merged, its folder gets its final name, the catalog names it. Imports no torch.

A checkpoint is written into the hidden folder `.step-00000100.ATTEMPT.partial`. At any moment that the job dies, either the catalog names
no attempt, or `finish_interrupted` finds it at the next start and finishes it, or removes it.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import xxhash

from pipeline.checkpoint import catalog, checked_json, native
from pipeline.checkpoint.catalog import INDEX, Pending, folder_of
from pipeline.checkpoint.native import PARTS, Index, PartsEntry
from pipeline.checkpoint.records import failure_name, merge, record_name
from pipeline.checkpoint.stored_runs import runs_of_rows
from pipeline.checkpoint.verify import damages
from pipeline.common.atomic_files import atomic_file, publish_folder, remove_leftovers
from pipeline.common.errors import UserError

log = logging.getLogger("pipeline")

#: The index without its files and weights, from the beginning of a save.
DRAFT = "draft.json"


def new_attempt() -> str:
    """A token that distinguishes the hidden folders of this job from those of earlier ones; rank 0 chooses it for all ranks."""
    return uuid.uuid4().hex[:12]


def partial_folder(run_dir: Path, step: int, attempt: str) -> Path:
    """The hidden folder in which a checkpoint is written."""
    final = folder_of(run_dir, step)
    return final.with_name(f".{final.name}.{attempt}.partial")


def begin(run_dir: Path, index: Index, attempt: str, writers: int) -> Path:
    """Create the hidden folder of a checkpoint and name it in the catalog. Called by one process, that will commit.

    Another writer may create the folder before; it does not wait.

    Args:
        run_dir: the run directory, locked by this job; it has checkpoints/, which is not created again if it is gone.
        index: of the checkpoint, without files and weights.
        attempt: token of the job.
        writers: number of records that will be written, by the writers 0 to writers - 1.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    folder = partial_folder(run_dir, index.train_state.step, attempt)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    pending = Pending(index.train_state.step, folder.name, writers, started)
    abandon(run_dir)
    remove_failed(folder)
    for partial in folder.parent.glob(f".{catalog.CATALOG}.*.partial"):  # of a writer that was killed; this process alone writes it
        partial.unlink(missing_ok=True)
    try:
        folder.mkdir(exist_ok=True)
        native.write_index(folder, replace(index, versions=index.versions or native.versions()), DRAFT)
        catalog.write(run_dir, replace(catalog.read(run_dir), pending=pending))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def remove_failed(folder: Path) -> None:
    """Remove the hidden folders of failed attempts, to which late writers have added files.

    Args:
        folder: of the attempt that is being committed. A writer that is ahead may write the next checkpoint already, which stays.
    """
    for other in folder.parent.glob(".step-*.partial"):
        if other != folder and step_of_partial(other) <= step_of_partial(folder):
            shutil.rmtree(other, ignore_errors=True)


def step_of_partial(folder: Path) -> int:
    """The step of a hidden folder; 0 for one of another name."""
    text = folder.name.removeprefix(".step-").partition(".")[0]
    return int(text) if text.isdecimal() else 0


def write_failure(folder: Path, writer: int, reason: str, *, create: bool = False) -> bool:
    """Say in the hidden folder why a writer has no record, unless it has one.

    Args:
        folder: the hidden folder.
        writer: number of the writer.
        reason: a sentence.
        create: whether the folder is made if it does not exist.

    Returns:
        Whether there is a record or a reason now. On a full disk the reason is an empty file, which often can still be created.
    """
    try:
        if create:
            folder.mkdir(exist_ok=True)
        if not (folder / record_name(writer)).exists():
            checked_json.write(folder / failure_name(writer), {"writer": writer, "reason": reason})
    except OSError:
        try:
            (folder / failure_name(writer)).touch()
        except OSError:
            return False
    return True


def missing(folder: Path, writers: int) -> tuple[list[int], dict[int, str]]:
    """Return the writers without a record yet, and those of them that have failed, with their reason. Lists the folder once."""
    names = {entry.name for entry in os.scandir(folder)}
    without = [writer for writer in range(writers) if record_name(writer) not in names]
    return without, {writer: _reason(folder / failure_name(writer)) for writer in without if failure_name(writer) in names}


def _reason(path: Path) -> str:
    """Why a writer has no record, as write_failure says it."""
    if not path.stat().st_size:
        return "it has failed, and could not write why: the disk is full"
    return str(checked_json.read(path)["reason"])


def commit(run_dir: Path) -> Path:
    """Make the checkpoint that the catalog names as pending complete, and return its folder. All records are there.

    Raises:
        OSError: a file cannot be written or is missing.
        ValueError: a record is damaged, a file that it names is gone, or the records do not hold every element of every weight once.
    """
    pending = catalog.read(run_dir).pending
    assert pending is not None, "no checkpoint is being written"
    folder = run_dir / "checkpoints" / pending.folder
    remove_leftovers(folder)  # of a commit that was interrupted
    merged = merge(folder, pending.writers)
    if gone := {file.name for file in merged.files} - {entry.name for entry in os.scandir(folder)}:
        raise ValueError(f"{min(gone)} was written, and is gone")
    with atomic_file(folder / PARTS, parents=False) as handle:
        np.save(handle, merged.rows)
    content = (folder / PARTS).read_bytes()
    draft = native.read_index(folder, DRAFT)
    entry = PartsEntry(len(content), xxhash.xxh3_64_hexdigest(content))
    native.write_index(folder, replace(draft, kinds=merged.kinds, files=merged.files, tensors=merged.tensors, parts=entry))
    publish_folder(folder, folder_of(run_dir, pending.step))
    _finish(run_dir, pending)
    return folder_of(run_dir, pending.step)


def _finish(run_dir: Path, pending: Pending) -> None:
    """Remove what only the commit needed, and name the checkpoint in the catalog; its folder has its final name."""
    final = folder_of(run_dir, pending.step)
    for name in [DRAFT, *map(record_name, range(pending.writers))]:
        (final / name).unlink(missing_ok=True)
    catalog.write(run_dir, catalog.Catalog([*catalog.read(run_dir).complete, pending.step]))


def abandon(run_dir: Path) -> None:
    """Remove the checkpoint that the catalog names as pending. If its folder has its final name already, it is named as complete.

    Raises:
        OSError: the catalog cannot be written.
    """
    current = catalog.read(run_dir)
    if current.pending is None:
        return
    if _is_published(run_dir, current.pending):
        _finish(run_dir, current.pending)
        return
    shutil.rmtree(run_dir / "checkpoints" / current.pending.folder, ignore_errors=True)
    catalog.write(run_dir, replace(current, pending=None))


def _is_published(run_dir: Path, pending: Pending) -> bool:
    """Whether the folder of a checkpoint has its final name."""
    return not (run_dir / "checkpoints" / pending.folder).is_dir() and (folder_of(run_dir, pending.step) / INDEX).is_file()


def finish_interrupted(run_dir: Path) -> None:
    """Finish the commit of a job that has died, or remove what it has written. The caller holds the lock of the run directory.

    The commit is finished if all records are there and every byte that they describe has its checksum. The catalog is then what the
    folder has: a checkpoint that a user has copied there is found, one that was moved away is not missed.

    Raises:
        OSError: a file cannot be written.
    """
    _finish_pending(run_dir)
    current = catalog.read(run_dir)
    steps = sorted({*catalog.listed(run_dir), *map(catalog.step_of, catalog.complete(run_dir))})
    if current.complete != steps:
        catalog.write(run_dir, replace(current, complete=steps))


def _finish_pending(run_dir: Path) -> None:
    """Finish or remove the checkpoint that the catalog names as pending, if there is one."""
    pending = catalog.read(run_dir).pending
    if pending is None:
        return
    if _is_published(run_dir, pending):
        _finish(run_dir, pending)
        return
    if (reason := _obstacle(run_dir / "checkpoints" / pending.folder, pending.writers)) is None:
        commit(run_dir)
        log.info("%s: finished the checkpoint of step %d, which an earlier job began at %s", run_dir, pending.step, pending.started)
        return
    abandon(run_dir)
    log.warning("%s: removed the incomplete checkpoint of step %d of an earlier job: %s", run_dir, pending.step, reason)


def _obstacle(folder: Path, writers: int) -> str | None:
    """Why a checkpoint cannot be committed; None if every part of it is present and unchanged."""
    try:
        without, _ = missing(folder, writers)
        if without:
            return f"{len(without)} of {writers} records are missing, the first is that of writer {without[0]}"
        native.read_index(folder, DRAFT)
        merged = merge(folder, writers)
        runs = list(runs_of_rows(merged.rows, merged.kinds, merged.tensors))
        damage = next(damages(folder, merged.files, merged.tensors, runs), None)
        return None if damage is None else str(damage)
    except (OSError, ValueError, UserError) as error:
        return str(error)
