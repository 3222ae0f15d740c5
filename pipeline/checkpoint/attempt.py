"""A save in progress as the writer process knows it, and its end: records of all writers are waited for, and old checkpoints removed.

Imports no torch.
"""

from __future__ import annotations

import shutil
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.checkpoint import catalog, commit
from pipeline.checkpoint.data_file import WrittenFile
from pipeline.checkpoint.handover import Member, identity_of
from pipeline.checkpoint.staged_file import Handed, NotFiniteError


def finish(run_dir: Path, partial: Path, writers: int, stopped: Callable[[], str], patience: Callable[[], float]) -> Path:
    """Wait for the records of all writers, and commit.

    Args:
        partial: folder of the attempt that the catalog names.
        stopped: why the attempt is given up, empty if it is not.
        patience: seconds after which the writers are not waited for any longer, if none of their records has appeared.

    Returns:
        The folder of the complete checkpoint.

    Raises:
        OSError: a writer has failed, or cannot be waited for any longer, or the commit cannot be written.
        ValueError: the records do not hold all of every weight.
    """
    before, changed, pause = writers, time.monotonic(), 0.005
    while True:
        missing, failed = commit.missing(partial, writers)
        if not missing:
            folder = commit.commit(run_dir)
            commit.remove_failed(partial)  # every writer has gone on to this checkpoint
            return folder
        if failed:
            writer, reason = next(iter(failed.items()))
            raise OSError(reason if writers == 1 else f"writer {writer}: {reason}")
        if reason := stopped():
            raise OSError(reason)
        if len(missing) < before:
            before, changed, pause = len(missing), time.monotonic(), 0.005
        if time.monotonic() - changed > patience():
            without = f"{len(missing)} of {writers} writers have no record after {patience():.0f} s"
            raise TimeoutError(f"{without}, the first is writer {missing[0]}")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


@dataclass
class Attempt:
    """A save in progress.

    Attributes:
        name: its token.
        handed: what each rank of this node has handed over.
        files: the files that have been written.
        done: the ranks whose data has been written.
        abandoned: why the attempt is given up, empty if it is not.
    """

    name: str
    number: int
    step: int
    handed: dict[int, Handed] = field(default_factory=dict)
    files: dict[str, WrittenFile] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    abandoned: str = ""


def discard(member: Member, step: int, attempt: str) -> bool:
    """Remove what was written of an attempt; a checkpoint that is complete already stays. Returns whether it is not complete."""
    with suppress(OSError):
        check_folder(member)
        if not (catalog.folder_of(member.run_dir, step) / catalog.INDEX).is_file():
            shutil.rmtree(commit.partial_folder(member.run_dir, step, attempt), ignore_errors=True)
            return True
    return False


def tell(member: Member, attempt: Attempt, reason: str) -> None:
    """Say in the partial folder why this node has no record, for the process that commits."""
    with suppress(OSError):
        check_folder(member)
        commit.write_failure(commit.partial_folder(member.run_dir, attempt.step, attempt.name), member.node, reason, create=True)


def tell_later(folder: Path, writer: int, reason: str, seconds: float) -> None:
    """Try in a thread to say in the partial folder why a writer has no record, until that succeeds: the disk may be full for a moment.

    Args:
        folder: the partial folder. Whoever commits removes it when the save is given up.
        writer: number of the writer.
        reason: as in commit.write_failure.
        seconds: after which whoever commits does not wait any longer.
    """

    def run() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and folder.is_dir() and not commit.write_failure(folder, writer, reason):
            time.sleep(0.5)

    threading.Thread(target=run, daemon=True).start()


def check_folder(member: Member) -> None:
    """Refuse to write into the folder of another run.

    Raises:
        FileNotFoundError: the folder of the checkpoints was removed, renamed or replaced.
    """
    folder = member.run_dir / "checkpoints"
    if identity_of(folder) != member.identity:
        raise FileNotFoundError(f"{folder} was removed or renamed while the run was writing to it")


def reason_of(error: Exception) -> str:
    """The reason of a failed save, for the log."""
    if isinstance(error, NotFiniteError):
        return f"{error} contains values that are not finite"
    if not isinstance(error, (OSError, ValueError)):
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return str(error)
