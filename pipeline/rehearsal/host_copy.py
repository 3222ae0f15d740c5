"""Saving in a rehearsal: the copy of the rank's state to host memory, without the writer process that would write it."""

from __future__ import annotations

import torch

from pipeline.checkpoint.save_plan import plan
from pipeline.checkpoint.saver import Outcome, Request, Saver
from pipeline.checkpoint.staging import Snapshot, Source, Staging, staged_bytes
from pipeline.rehearsal.memory import BETWEEN, Moments
from pipeline.training.trainer import Trainer


class HostCopySaver(Saver):
    """The part of AsyncSaver that uses the device.

    Args:
        trainer: whose state is saved.
        device: of the rank.
        moments: where memory is noted.

    Attributes:
        bytes: that are copied.
    """

    def __init__(self, trainer: Trainer, device: torch.device, moments: Moments) -> None:
        self._shares = plan([fragment.held() for fragment in trainer.engine.fragments()])
        self.bytes = staged_bytes([share.part for share in self._shares])
        self._staging = Staging([share.part for share in self._shares], device)
        self._moments = moments
        self._snapshot: Snapshot | None = None
        self._outcomes: list[Outcome] = []

    def begin(self, request: Request) -> None:
        """See Saver."""
        self.before_update()
        self._moments.note(BETWEEN)
        sources = [Source(share.part, request.fragments[share.fragment].tensors, share.first) for share in self._shares]
        self._snapshot = self._staging.begin(sources, lambda _: None)
        self._snapshot.queued.wait()
        self._moments.note("save")
        self._outcomes.append(Outcome(request.step))

    def holds_weights(self) -> bool:
        """See Saver."""
        return self._snapshot is not None

    def before_update(self) -> None:
        """See Saver."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot.released.set()
            self._snapshot = None

    def poll(self) -> list[Outcome]:
        """See Saver."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """See Saver."""
        self.before_update()

    def wait_for_commit(self) -> None:
        """See Saver."""

    def abandon(self, reason: str) -> None:
        """See Saver."""

    def close(self) -> None:
        """See Saver."""
        self.before_update()
        self._staging.close()
