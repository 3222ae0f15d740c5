"""The interface of saving during training, and the saver that writes while training waits: it needs no host memory for copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint import save
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.handover import Commit, LastUpdate, NotFiniteWeightsError
from pipeline.checkpoint.native import Index, TrainState
from pipeline.common.errors import UserError


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint that is to be written.

    Attributes:
        step: completed steps.
        last_update: the last update of the optimizer, called when the device has made it; None if the optimizer is another one.
        commit: the index, and what is kept; set on rank 0, and called when the checkpoint may become complete.
    """

    step: int
    fragments: list[Fragment]
    last_update: Callable[[], LastUpdate | None]
    commit: Callable[[], Commit] | None


@dataclass(frozen=True)
class SaveOutcome:
    """How a save has ended, as far as this rank knows.

    Attributes:
        folder: of the complete checkpoint, which rank 0 alone knows.
        reason: why the save failed, empty if it did not.
        not_finite: a weight that is not finite, empty if that is not the reason.
        told: whether rank 0 learns of a failure without this rank.
    """

    step: int
    folder: Path | None = None
    reason: str = ""
    not_finite: str = ""
    told: bool = True


class Saver(ABC):
    """Saves checkpoints. Every rank makes the same calls; none of them is collective.

    Attributes:
        waits: whether a checkpoint is complete when `begin` returns.
    """

    waits = False

    @abstractmethod
    def begin(self, request: SaveRequest) -> None:
        """Begin to save. Waits for the save before, whose outcome is not lost."""

    @abstractmethod
    def holds_weights(self) -> bool:
        """Whether a copy of the weights is being made, so that they must not change."""

    @abstractmethod
    def before_update(self) -> None:
        """Wait until the weights may change. Called before every update of the optimizer."""

    @abstractmethod
    def poll(self) -> list[SaveOutcome]:
        """The outcomes that are known by now and were not returned yet: of rank 0 of every save, of other ranks of those that failed."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the data of this rank is on the disk, or could not be written."""

    @abstractmethod
    def wait_for_commit(self) -> None:
        """On rank 0, wait until the checkpoint is complete, or has failed."""

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """Give up the save in progress, since another rank could not write its part. Has an effect on rank 0 only."""

    @abstractmethod
    def close(self) -> None:
        """Release what the saver has. What was handed over to another process is still written."""


class SyncSaver(Saver):
    """Writes a checkpoint before it returns; all ranks wait for each other."""

    waits = True

    def __init__(self, run_dir: Path, files: str) -> None:
        self._run_dir, self._files = run_dir, files
        self._outcomes: list[SaveOutcome] = []

    def begin(self, request: SaveRequest) -> None:
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
            self._outcomes.append(SaveOutcome(request.step, reason=error.violations[0].rule))
        else:
            self._outcomes.append(SaveOutcome(request.step, folder=folder))

    def holds_weights(self) -> bool:
        """See Saver."""
        return False

    def before_update(self) -> None:
        """See Saver."""

    def poll(self) -> list[SaveOutcome]:
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
