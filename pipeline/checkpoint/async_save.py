"""Saves checkpoints beside training: the copy of a rank's state is handed over to the writer process of its node.

No call is collective. A rank learns what became of its own part from the writer of its node; rank 0 learns what became of the checkpoint,
from that of the first node, which waits for the records of all nodes in the file system.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pipeline.checkpoint import commit, handover
from pipeline.checkpoint.fragments import Fragment, Share
from pipeline.checkpoint.handover import Abandon, Committed, Failed, Member, Save, Written
from pipeline.checkpoint.save import file_name, node_file_name
from pipeline.checkpoint.saver import SaveOutcome, Saver, SaveRequest
from pipeline.checkpoint.staging import LiveSource, Snapshot, Staging
from pipeline.checkpoint.writer_process import WriterConnection, WriterEndedError, WriterProcess
from pipeline.common.atomic_files import remove_leftovers

log = logging.getLogger("pipeline")

#: Seconds for which a rank that waits for a save goes on to look for a writer: others may wait for this rank before they start one.
_GRACE = 1.0


@dataclass(frozen=True)
class Node:
    """The node of a rank.

    Attributes:
        writer: address of its writer process.
        count: number of nodes.
    """

    writer: str
    ranks: tuple[int, ...]
    number: int
    count: int


@dataclass
class _SaveInProgress:
    """A save in progress.

    Attributes:
        attempt: token of the save.
        data: whether the data of this rank is still to be written.
        commit: whether this rank still waits for the commit.
        failed: whether its failure has been reported.
        updates: of the optimizer.
    """

    step: int
    attempt: str
    number: int
    data: bool = True
    commit: bool = False
    failed: bool = False
    updates: int = 0


class AsyncSaver(Saver):
    """Saves beside training.

    Args:
        run_dir: the run directory, in which checkpoints/ exists.
        process: the writer process, on the rank that has started it.
        files: checkpoint.files: a data file of each "rank" or "node".
        token: of the job, for the names of partial folders.
        lock: file descriptor of the lock of the run directory, on rank 0.
        patience: seconds after which a save that is waited for is given up.
        before_next: the same where the next save waits; other ranks may wait for this one in a collective of the next step.

    Raises:
        OSError: there is not enough memory, or the writer process does not answer.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        node: Node,
        process: WriterProcess | None,
        shares: Sequence[Share],
        files: str,
        device: torch.device,
        token: str,
        lock: int | None,
        patience: float,
        before_next: float,
    ) -> None:
        self._run_dir, self._rank, self._node, self._process, self._shares = run_dir.absolute(), rank, node, process, shares
        self._token, self._patience, self._before_next = token, patience, before_next
        self._identity = handover.identity_of(run_dir / "checkpoints")
        self._staging = Staging([share.part for share in shares], device)
        self._snapshot: Snapshot | None = None
        self._pending: _SaveInProgress | None = None
        self._written: tuple[int, str] | None = None  # step and attempt of the last data that was written
        self._count = 0
        self._waiting = math.inf  # time from which on this rank waits for a save
        self._failures: queue.SimpleQueue[Failed] = queue.SimpleQueue()  # of the thread that hands over
        self._outcomes: list[SaveOutcome] = []
        self._previous: tuple[int, np.ndarray] | None = None  # updates and checksums of the save before
        descriptors = [segment.file for segment in self._staging.segments] + ([] if lock is None else [lock])
        member = self._member(node, shares, files, lock, patience)
        self._writer = WriterConnection(member, descriptors, node.writer, process)

    def begin(self, request: SaveRequest) -> None:
        """See Saver."""
        self.before_update()
        self._receive_while(lambda pending: pending.data or pending.commit, self._before_next)
        self._receive(0)  # a writer that has ended is not one that this save is handed over to
        self._count += 1
        attempt = f"{self._token}-{self._count}"
        self._pending = _SaveInProgress(request.step, attempt, self._count, commit=request.commit is not None)
        sources = self._sources(request.fragments)
        self._snapshot = self._staging.begin(sources, partial(self._hand_over, request, self._pending))

    def holds_weights(self) -> bool:
        """See Saver."""
        return self._snapshot is not None

    def before_update(self) -> None:
        """See Saver. The writer gets the copy only now, so that rank 0 may have written the metrics of the step before."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot.released.set()
            self._snapshot = None

    def poll(self) -> list[SaveOutcome]:
        """See Saver."""
        self._receive(0)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """See Saver."""
        self.before_update()
        self._receive_while(lambda pending: pending.data, self._patience)

    def wait_for_commit(self) -> None:
        """See Saver."""
        self._receive_while(lambda pending: pending.commit, self._patience)

    def abandon(self, reason: str) -> None:
        """See Saver."""
        if self._pending is not None and self._pending.commit:
            self._writer.send(Abandon(self._pending.step, self._pending.attempt, self._pending.number, reason))

    def close(self) -> None:
        """See Saver."""
        if self._snapshot is not None:
            self._snapshot.problem = "the run has ended"
            self._snapshot.released.set()
        self._staging.close()
        self._writer.close()
        code = None if self._process is None else self._process.close()
        if self._rank == 0 and code and self._pending is None:  # it died as it removed older checkpoints, after the last one was complete
            remove_leftovers(self._run_dir / "checkpoints")

    def _sources(self, fragments: Sequence[Fragment]) -> list[LiveSource]:
        """The live tensors of the parts that this rank writes."""
        return [LiveSource(share.part, fragments[share.fragment].tensors, share.first) for share in self._shares]

    def _hand_over(self, request: SaveRequest, pending: _SaveInProgress, snapshot: Snapshot) -> None:
        """Hand a copy over to the writer. The thread of the snapshot."""
        try:
            if snapshot.problem:
                raise ValueError(snapshot.problem)
            update = request.last_update()
            pending.updates = 0 if update is None else update.updates
            before, previous = (0, None) if self._previous is None else self._previous
            update = None if previous is None or pending.updates <= before else update
            settings = None if request.commit is None else request.commit()
            save = Save(request.step, pending.attempt, pending.number, snapshot.sums(), previous, update, settings)
            self._writer.deliver(save, lambda: self._pending is pending, lambda: time.monotonic() < self._waiting + _GRACE)
        except Exception as error:
            self._failures.put(Failed(pending.attempt, str(error)))

    def _member(self, node: Node, shares: Sequence[Share], files: str, lock: int | None, patience: float) -> Member:
        """How this rank introduces itself to the writer; arguments as of the class."""
        shared = files == "node"
        return Member(
            rank=self._rank,
            ranks=node.ranks,
            node=node.number,
            nodes=node.count,
            run_dir=self._run_dir,
            identity=self._identity,
            sharing=node.ranks if shared else (self._rank,),
            file=node_file_name(node.number) if shared else file_name(self._rank),
            parts=[share.part for share in shares],
            places=self._staging.places,
            segments=[segment.size for segment in self._staging.segments],
            has_lock=lock is not None,
            patience=patience,
        )

    def _receive_while(self, condition: Callable[[_SaveInProgress], bool], patience: float) -> None:
        """Receive answers as long as a condition holds for the save in progress, and give it up after some seconds."""
        self._waiting = time.monotonic()
        deadline = self._waiting + patience
        while self._pending is not None and condition(self._pending):
            self._receive(0.2)
            if time.monotonic() > deadline and self._pending is not None:
                reason = f"it was not written when {patience:.0f} s had been waited for it: the file system is too slow for these intervals"
                if self._pending.data:
                    reason = f"{reason} {self._writer.end()}".strip()
                self._not_handed_over(Failed(self._pending.attempt, reason))
        self._waiting = math.inf

    def _receive(self, seconds: float) -> None:
        """Receive the answers that are there, and wait for the first one for some time."""
        with suppress(queue.Empty):
            while True:
                self._not_handed_over(self._failures.get_nowait())
        try:
            for answer in self._writer.receive(seconds):
                self._answered(answer)
        except WriterEndedError as error:
            if self._pending is not None:
                self._failures.put(Failed(self._pending.attempt, str(error)))
            else:
                log.warning("%s; it is started again for the next checkpoint", error)
                self._forgotten(str(error))

    def _answered(self, answer: Written | Failed | Committed) -> None:
        pending = self._pending
        if pending is None or answer.attempt != pending.attempt:
            return
        if isinstance(answer, Written):
            self._previous, self._written = (pending.updates, answer.digests), (pending.step, pending.attempt)
            pending.data = False
        elif isinstance(answer, Committed):
            self._outcomes.append(SaveOutcome(pending.step, folder=answer.folder))
            pending.commit = False
        else:
            self._failed(pending, answer)
        if not (pending.data or pending.commit):
            self._pending = None

    def _failed(self, pending: _SaveInProgress, failed: Failed) -> None:
        """Note that the data or the commit of the save in progress has failed."""
        if not pending.failed:
            self._outcomes.append(SaveOutcome(pending.step, reason=failed.reason, not_finite=failed.not_finite, told=failed.told))
        pending.failed = True
        if failed.commit:
            pending.commit = False
        else:
            pending.data = False

    def _not_handed_over(self, failed: Failed) -> None:
        """Give up the save in progress: the writer has not got the data of this rank, or has ended, or does not answer.

        Who commits learns of it from the writer of the node or, if there is none or that is another one, in the partial folder.
        """
        pending = self._pending
        if pending is None or failed.attempt != pending.attempt:
            return
        self._pending = None
        sent = self._writer.send(Abandon(pending.step, pending.attempt, pending.number, failed.reason))
        told = True
        if self._rank > 0 and not (sent and self._node.number == 0):
            told = self._tell(pending.step, pending.attempt, failed.reason, create=True)
        self._failed(pending, replace(failed, told=told))

    def _forgotten(self, reason: str) -> None:
        """The writer has ended after it had written the last data of this rank, perhaps before the checkpoint was complete."""
        if self._rank > 0 and self._written is not None:
            self._tell(*self._written, reason, create=False)

    def _tell(self, step: int, attempt: str, reason: str, *, create: bool) -> bool:
        """Say in the partial folder that this node has no record, unless it has one. Returns whether it is said.

        Args:
            create: whether the folder is made if it does not exist.
        """
        folder = commit.partial_folder(self._run_dir, step, attempt)
        if handover.identity_of(folder.parent) != self._identity:
            return False
        return commit.write_failure(folder, self._node.number, reason, create=create)
