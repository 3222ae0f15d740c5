"""The training loop: batch, step, callbacks. Its state is that of the engine and the number of consumed samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from pipeline.checkpoint.native import TrainState
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.callback import REQUESTS, Callback, Step
from pipeline.training.trainer import Trainer


def train(
    state: TrainState,
    loader: BatchLoader,
    trainer: Trainer,
    callbacks: Sequence[Callback],
    report: Callable[[str], None] = lambda _: None,
) -> TrainState:
    """Train from `state` until the last step of the loader, or an exception of a callback, and return the final state.

    Args:
        trainer: its model and optimizer are in the state `state`.
        report: called with what is done next, as Watchdog.report.
    """
    since = time.monotonic()
    report(f"loading the batch of step {state.step + 1}")
    for tokens, batch in loader.remaining(state):
        more = {"data_seconds": time.monotonic() - since, "data_stalls": loader.stalls}
        report(f"step {state.step + 1}")
        requested = {name for callback in callbacks for name in callback.requests()}
        with ExitStack() as contexts:
            for callback in callbacks:
                contexts.enter_context(callback.during_step(state.step + 1))
            loss, result = trainer.train(tokens, batch, [name in requested for name in REQUESTS], state.step)
        now, samples = time.monotonic(), loader.batch_size(state.step)
        state = loader.after(state)
        step = Step(state, tokens, batch, loss, result, samples, now - since, more, last=state.step == loader.steps, since=now)
        for callback in callbacks:
            callback.after_step(step)
        if any(callback.wants_save(step) for callback in callbacks):
            for callback in callbacks:
                callback.before_save(step)
            for callback in reversed(callbacks):
                callback.save(step)
        if step.last or step.decision.stop is not None:
            for callback in reversed(callbacks):
                callback.end(step)
        since, state = step.since, step.state
        del step  # with its batch, before the next one is used
        report(f"loading the batch of step {state.step + 1}")
    return state
