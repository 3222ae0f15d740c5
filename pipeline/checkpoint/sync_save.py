"""Saves checkpoints while training waits: needs no host memory for copies."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint import save
from pipeline.checkpoint.handover import Commit, NotFiniteWeightsError
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.saver import Outcome, Request, Saver
from pipeline.common.errors import UserError


class SyncSaver(Saver):
    """Writes a checkpoint before it returns; all ranks wait for each other.

    Args:
        run_dir: the run directory.
        files: checkpoint.files.
    """

    waits = True

    def __init__(self, run_dir: Path, files: str) -> None:
        self._run_dir, self._files = run_dir, files
        self._outcomes: list[Outcome] = []

    def begin(self, request: Request) -> None:
        """See Saver.

        Raises:
            NotFiniteWeightsError: a weight is not finite; on all ranks.
        """
        settings = Commit(Index(TrainState(request.step), {}), 1, 0, frozenset()) if request.commit is None else request.commit()
        try:
            folder = save.save(
                self._run_dir,
                settings.index,
                request.fragments,
                settings.keep,
                lambda old: old.name in settings.needed,
                every=settings.keep_every,
                files=self._files,
            )
        except NotFiniteWeightsError:
            raise
        except UserError as error:
            self._outcomes.append(Outcome(request.step, reason=error.violations[0].rule))
        else:
            self._outcomes.append(Outcome(request.step, folder=folder))

    def holds_weights(self) -> bool:
        """See Saver."""
        return False

    def before_update(self) -> None:
        """See Saver."""

    def poll(self) -> list[Outcome]:
        """See Saver."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """See Saver."""

    def wait_for_commit(self) -> None:
        """See Saver."""

    def abandon(self, reason: str) -> None:
        """See Saver."""

    def close(self) -> None:
        """See Saver."""
