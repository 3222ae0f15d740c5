"""The checkpoints of a training run: when one begins, what becomes of it, and what its failure means.

Training goes on while a checkpoint is written. One that fails is logged and counted, and the next one is another try; after
checkpoint.max_failures in a row the run ends. Only at the end of a run do the ranks wait for each other, and for the last checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.checkpoint import handover, native
from pipeline.checkpoint.handover import Commit, LastUpdate
from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.saver import SaveOutcome, Saver, SaveRequest
from pipeline.common.atomic_files import advice, is_full
from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.parallel.mesh import INPUT_OUTPUT, gather_objects, on_rank_0
from pipeline.training.callback import Callback, Step
from pipeline.training.checkpoint_hooks import CheckpointHooks
from pipeline.training.lr_schedule import learning_rate
from pipeline.training.metrics import Metrics
from pipeline.training.step_control import HostCopy
from pipeline.training.trainer import Trainer
from pipeline.training.watchdog import Watchdog

log = logging.getLogger("pipeline")

#: Seconds between the attempts to write what a run ends with, its last checkpoint and its manifest: a disk may be full for a moment only.
LAST_WAITS = (2.0, 20.0)
_THEN = "checkpoint.resume=auto continues from the newest checkpoint"


class Saves(Callback):
    """Begins checkpoints and follows them to their end.

    Args:
        metrics: has all steps of a checkpoint before that becomes complete.
        parent: Index.parent of the checkpoints.
        on_complete: called with the step of a checkpoint that has become complete, unless the run returns to an older one.

    Attributes:
        failures: number of checkpoints that could not be written, on rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        data: Objective,
        metrics: Metrics,
        watchdog: Watchdog,
        hooks: CheckpointHooks,
        saver: Saver,
        parent: dict[str, Any] | None = None,
        on_complete: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._config, self._trainer, self._data, self._metrics = config, trainer, data, metrics
        self._watchdog, self._hooks, self._saver, self._parent = watchdog, hooks, saver, parent
        self._rank = trainer.mesh.rank
        self._settings: dict[str, Any] | None = None
        self.failures = 0
        self._on_complete = on_complete
        self._complete: list[int] = []
        self._in_a_row, self._failing_since = 0, 0.0
        self._last: SaveOutcome | None = None
        self._seconds = 0.0  # of the last save, until the line of the next step has them
        self._failed = False
        self._fatal: UserError | None = None
        trainer.before_update = self.before_update

    def requests(self) -> Collection[str]:
        """See Callback: rank 0 has to be told that this rank's part of a checkpoint failed; the run must end."""
        failed, self._failed = self._failed, False
        return [name for name, is_made in (("failed", failed), ("fatal", self._fatal is not None)) if is_made]

    def after_step(self, step: Step) -> None:
        """Learn what has become of the checkpoint that is being written, and act on the requests of all ranks.

        Raises:
            UserError: the run must end; the same on all ranks.
        """
        step.more["save_failures"] = self.failures
        if self._seconds:
            step.more["save_seconds"], self._seconds = self._seconds, 0.0
        self.poll()
        self._tell()
        if step.decision.failed:
            self._saver.abandon("a rank could not write its part; the log has the reason")
        if step.decision.fatal:
            raise UserError(self._gather_fatal())

    def wants_save(self, step: Step) -> bool:
        """See Callback: the last step, those of the configuration, and further ones."""
        number, every = step.state.step, self._config.checkpoint.every
        scheduled = bool(every and number % every == 0) or number in self._config.optimizer.decay_ends
        return step.last or scheduled or self._hooks.writes(number)

    def save(self, step: Step) -> None:
        """See Callback."""
        self.begin(step.state)
        now = time.monotonic()
        self._seconds, step.since = now - step.since, now

    def end(self, step: Step) -> None:
        """Wait until the checkpoint of the last step is complete; raises as finish."""
        step.state = self.finish(step.state)

    def begin(self, state: TrainState) -> None:
        """Begin the checkpoint of a state: the weights are copied while the next step computes its gradients."""
        if self._rank == 0 and self._gone():
            return
        self._watchdog.report(f"checkpoint of step {state.step}", INPUT_OUTPUT)
        if self._saver.waits:
            self._metrics.flush()  # a complete checkpoint has the lines of all its steps
        engine = self._trainer.engine
        counters = HostCopy(engine.counters())
        commit = partial(self._commit, state, counters) if self._rank == 0 else None
        self._last = None
        self._saver.begin(SaveRequest(state.step, engine.fragments(), partial(self._last_update, counters), commit))

    def before_update(self) -> None:
        """Wait until the weights may change; called before every update of the optimizer."""
        if self._saver.holds_weights():
            self._metrics.flush()  # as in begin
        self._saver.before_update()

    def poll(self) -> None:
        """Learn what has become of the checkpoint that is being written."""
        for outcome in self._saver.poll():
            self._last = outcome
            if outcome.not_finite:
                self._fatal = handover.not_finite(outcome.step, outcome.not_finite)
            if outcome.reason:
                self._count(outcome)
            elif outcome.folder is not None:
                self._in_a_row = 0
                self._complete.append(outcome.step)
                log.info("step %d: wrote %s", outcome.step, outcome.folder)
                if self._hooks.writes(outcome.step):
                    self._hooks.written()

    def finish(self, state: TrainState) -> TrainState:
        """Wait until the checkpoint of a state, which has begun, is complete; every rank calls this. Returns it with the engine's counters.

        Raises:
            UserError: the weights are not finite, the run directory is gone, or the checkpoint could not be written, at several attempts.
        """
        for wait in (*LAST_WAITS, None):
            self._watchdog.report(f"writing the checkpoint of step {state.step}", INPUT_OUTPUT)
            self._metrics.flush()
            reason = self._wait(state.step)
            if not reason:
                self._tell()
                return self._with_counters(state, HostCopy(self._trainer.engine.counters()))
            if wait is not None:
                log.warning("step %d: trying once more to write the checkpoint, in %.0f s", state.step, wait)
                time.sleep(wait)
                self.begin(state)
        folder = native.folder_of(Path(self._config.run_dir), state.step)
        raise UserError.of("run_dir", folder, f"the checkpoint could not be written: {reason}", advice(reason, _THEN))

    def _tell(self) -> None:
        """Tell which checkpoints have become complete."""
        for step in self._complete:
            self._on_complete(step)
        self._complete.clear()

    def settle(self, step: int) -> None:
        """Wait until no checkpoint is being written, at a step after which the run returns to an older one; every rank calls this.

        Raises:
            UserError: the weights are not finite, or the run directory is gone.
        """
        self._watchdog.report(f"returning from step {step} to a checkpoint", INPUT_OUTPUT)
        self._metrics.flush()
        self._wait(step)

    def _wait(self, step: int) -> str:
        """Wait for the checkpoint of a step; returns why it failed, on all ranks, empty if it did not. Collective."""
        self._saver.wait()
        self.poll()
        UserError.raise_for(self._gather_fatal())
        reasons = [answer for answer in gather_objects(self._last.reason if self._last is not None else "") if answer]
        if self._rank == 0:
            if reasons:
                self._saver.abandon(reasons[0])
            self._saver.wait_for_commit()
            self.poll()
        reason: str = on_rank_0(lambda: self._last.reason if self._last is not None and self._last.step == step else "it was not begun")
        return reasons[0] if reasons else reason

    def _gather_fatal(self) -> list[Any]:
        """The violations of all ranks because of which the run must end. Collective."""
        answers = gather_objects(() if self._fatal is None else self._fatal.violations)
        return list(dict.fromkeys(violation for answer in answers for violation in answer))

    def _gone(self) -> bool:
        """Whether the run directory was removed or replaced: the run ends, and nothing is written to what is there now."""
        try:
            self._metrics.check_file()
        except UserError as error:
            self._fatal = error
        return self._fatal is not None

    def _count(self, outcome: SaveOutcome) -> None:
        """Log and count a checkpoint that failed; rank 0 ends the run after too many in a row."""
        most = self._config.checkpoint.max_failures
        if self._rank > 0:
            self._failed = self._failed or not outcome.told
            log.warning("step %d: this rank could not write its part of the checkpoint: %s", outcome.step, outcome.reason)
            return
        self.failures += 1
        self._in_a_row += 1
        self._failing_since = time.monotonic() if self._in_a_row == 1 else self._failing_since
        minutes = (time.monotonic() - self._failing_since) / 60 if is_full(outcome.reason) else math.inf
        text = "step %d: the checkpoint could not be written (failure %d in a row, checkpoint.max_failures=%d): %s"
        log.warning(text, outcome.step, self._in_a_row, most, outcome.reason)
        if self._in_a_row >= most and minutes >= self._config.checkpoint.failing_minutes and self._fatal is None:
            rule = f"{self._in_a_row} checkpoints in a row could not be written, the last one: {outcome.reason}"
            self._fatal = UserError.of("checkpoint.max_failures", most, rule, advice(outcome.reason, _THEN))

    def _commit(self, state: TrainState, counters: HostCopy) -> Commit:
        """What rank 0 adds to a save; in the thread of the snapshot."""
        config, run_dir = self._config, Path(self._config.run_dir)
        if self._settings is None:
            self._settings = dataclasses.asdict(config)
        fingerprint, world_size = self._data.fingerprint(config, state.samples), self._trainer.mesh.layout.world_size
        index = native.new_index(self._with_counters(state, counters), self._settings, fingerprint, world_size)
        ends = config.optimizer.decay_ends
        needed = frozenset(
            folder.name for folder in native.complete(run_dir) if native.step_of(folder) in ends or self._hooks.keeps(folder)
        )
        return Commit(dataclasses.replace(index, parent=self._parent), config.checkpoint.keep, config.checkpoint.keep_every, needed)

    def _last_update(self, counters: HostCopy) -> LastUpdate:
        """The last update; in the thread of the snapshot."""
        updates = int(counters.values()[0])
        optimizer, training = self._config.optimizer, self._config.training
        rate = learning_rate(max(min(updates, training.steps) - 1, 0), optimizer, training)
        return LastUpdate(rate, updates, optimizer, training.steps)

    @staticmethod
    def _with_counters(state: TrainState, counters: HostCopy) -> TrainState:
        """Return the state with the counters of the engine."""
        updates, factor, finite_steps = counters.values()
        return dataclasses.replace(state, updates=int(updates), loss_scale=factor, finite_steps=int(finite_steps))
