"""What the process that commits does: waits for the records of all writers, commits, and removes old checkpoints. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pipeline.checkpoint import catalog, commit
from pipeline.checkpoint.handover import Commit


def finish(run_dir: Path, partial: Path, writers: int, stopped: Callable[[], str], patience: Callable[[], float]) -> Path:
    """Wait for the records of all writers, and commit.

    Args:
        run_dir: the run directory.
        partial: folder of the attempt that the catalog names.
        writers: number of records.
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


def prune(run_dir: Path, settings: Commit) -> None:
    """Remove the checkpoints that nothing keeps. One that cannot be removed is removed after the next save.

    Raises:
        OSError: one could not be removed.
    """
    catalog.prune(run_dir, settings.keep, settings.keep_every, lambda old: old.name in settings.needed)
