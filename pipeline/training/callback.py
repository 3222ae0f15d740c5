"""What a training run does besides its steps: each part of it is a callback, and the loop knows none of them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from pipeline.checkpoint.native import TrainState
from pipeline.layers.batch import Batch
from pipeline.training.weight_update import StepResult

#: What a rank can request of all ranks: to save a checkpoint; to stop, as the time ends, the job was canceled, by Ctrl-C, or by a file;
#: to give up a checkpoint of which it could not write its part; to end with an error; to return to an older checkpoint.
REQUESTS = ("save", "time", "canceled", "interrupted", "stop", "failed", "fatal", "rewind")


@dataclass(frozen=True)
class Decision:
    """What all ranks do after a step.

    Attributes:
        save: write a checkpoint.
        stop: exit code of the run, which stops after writing a checkpoint; None if it goes on.
        reason: ToBeContinued.reason of a stop.
        failed: a rank could not write its part of a checkpoint.
        fatal: the run must end with an error, whose reason a rank knows.
        rewind: the loss has spiked: the run returns to a checkpoint.
    """

    save: bool = False
    stop: int | None = None
    reason: str = ""
    failed: bool = False
    fatal: bool = False
    rewind: bool = False


@dataclass
class Step:
    """A step that was just queued. Its tensors may still be computed on the device.

    Attributes:
        state: after the step.
        tokens, batch: this rank's share of the global batch, as in Trainer.train.
        loss: mean loss of the global batch, 0-dim.
        samples: size of the global batch.
        seconds: from the end of queuing the step before to that of this one.
        more: further numbers of its line in metrics.jsonl, known on the host.
        since: time.monotonic() from which the seconds of the next step count; a callback whose time is not that of a step sets it anew.
        decision: of all ranks; made by StepControl.after_step.
    """

    state: TrainState
    tokens: Tensor
    batch: Batch
    loss: Tensor
    result: StepResult
    samples: int
    seconds: float
    more: dict[str, float]
    last: bool
    since: float
    decision: Decision = Decision()


class Callback:
    """Hooks of the training loop, which all ranks call in the order of the list of callbacks: a hook may be collective.

    A hook that raises ends the training loop.
    """

    def requests(self) -> Collection[str]:
        """Return what this rank requests of all ranks, of REQUESTS. StepControl acts on it one step later."""
        return ()

    def during_step(self, number: int) -> AbstractContextManager[None]:
        """Return a context in which a step is queued; `number` counts it, too."""
        return nullcontext()

    def after_step(self, step: Step) -> None:
        """Act on a step that was queued."""

    def wants_save(self, step: Step) -> bool:
        """Whether a checkpoint of the state after a step is to be written; the same on all ranks."""
        return False

    def before_save(self, step: Step) -> None:
        """Check the state of which a checkpoint will be written."""

    def save(self, step: Step) -> None:
        """Begin or note a checkpoint. Called in the reverse order of the list."""

    def end(self, step: Step) -> None:
        """Complete what the job leaves behind after its last step. Called in the reverse order of the list."""
