"""A save in progress, as the writer process of a node knows it, and the partial folder that it is written to. Imports no torch."""

from __future__ import annotations

import shutil
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.checkpoint import catalog, commit
from pipeline.checkpoint.data_file import WrittenFile
from pipeline.checkpoint.handover import Member, identity_of
from pipeline.checkpoint.staged_file import Handed, NotFiniteError


@dataclass
class Attempt:
    """A save in progress.

    Attributes:
        name: its token.
        number: of the save.
        step: of the checkpoint.
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
