"""Writes metrics.jsonl, Weights & Biases and log lines from rank 0, without a synchronization of the device."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from pipeline.checkpoint.native import TrainState
from pipeline.common import metrics_file, wandb_run
from pipeline.common.errors import ToBeContinued, UserError
from pipeline.common.progress import Progress
from pipeline.config.schema import RunConfig
from pipeline.data.load import removal
from pipeline.training.callback import Callback, Step
from pipeline.training.metrics_writer import MetricsWriter, keep_steps
from pipeline.training.noise_scale import NoiseScale
from pipeline.training.step_control import HostCopy
from pipeline.training.validation import Validation

log = logging.getLogger("pipeline")

FILE = metrics_file.FILE
#: Corpora whose validation loss is logged, the largest ones; the file has all.
_LOGGED_CORPORA = 10


@dataclass(frozen=True)
class _PendingStep:
    """A step whose metrics may not have been copied from the device yet."""

    state: TrainState
    values: HostCopy
    samples: int
    seconds: float
    names: tuple[str, ...]
    more: dict[str, float]
    memory: dict[str, float]


class Metrics(Callback):
    """Writes one JSON object per step, on rank 0.

    The metrics of a step are copied to the host asynchronously and written when the next step has been queued, so the host
    stays ahead of the device. On resume, lines of steps that did not lead to the checkpoint are removed first.

    Args:
        flops_per_token: forward and backward FLOPs of the full model.
        peak_flops: peak of all devices of the job in FLOP/s, None if unknown (a CPU); mfu is null then.
        first_step: first step of this run directory; lines of earlier ones are those of another run.

    Raises:
        OSError: metrics.jsonl cannot be opened.
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        resumed: TrainState,
        *,
        flops_per_token: float = 0.0,
        peak_flops: float | None = None,
        first_step: int = 1,
    ) -> None:
        run_dir, tracking, steps = Path(config.run_dir), config.tracking, config.training.steps
        self._run_dir, self._rank, self._log_every = run_dir, rank, tracking.log_every
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._tokens_per_sample = config.training.sample_length
        self._skipped_before = resumed.step - resumed.updates
        self._noise = NoiseScale(run_dir)
        self._pending: _PendingStep | None = None
        self._last_log = (resumed.samples, resumed.step, time.monotonic())
        self._steps, self._last = steps, {}  # type: int, dict[str, Any]
        self._progress = partial(Progress, steps - resumed.step, config.stage.name, "step", rank, every=math.inf)
        self._wandb: Any = None
        if rank == 0:
            self._removed = {"removed": len(removed)} if (removed := removal.of_run(run_dir)) else {}
            self._path = run_dir / FILE
            keep_steps(self._path, first_step, resumed.step)
            self._file = MetricsWriter(self._path)
            if tracking.wandb != "disabled":
                settings = {**asdict(config), "resumed_at": resumed.step}
                self._wandb = wandb_run.start(run_dir, run_dir, tracking.wandb, tracking.project, tracking.name, settings)

    def after_step(self, step: Step) -> None:
        """Record a step that was just queued, and write the previous one."""
        if self._rank > 0:
            return
        result = step.result
        numbers = (result.gradient_norm, result.lr, result.skipped, *result.more.values())
        values = HostCopy(torch.stack([step.loss.detach().float(), *(number.to(step.loss.device) for number in numbers)]))
        # The most memory that this rank has reserved on its GPU, which is known on the host: no synchronization.
        memory = {"memory_gb": torch.cuda.max_memory_reserved() / 1e9} if torch.cuda.is_available() else {}
        previous = self._pending
        self._pending = _PendingStep(step.state, values, step.samples, step.seconds, tuple(result.more), step.more, memory)
        if previous is not None:
            self._write(previous)
        self._bar.advance(1, f"loss {self._last['loss']:.3f}" if self._last else "")

    def flush(self) -> None:
        """Write the pending step and lines that could not be written before, so that the file contains all completed steps."""
        if self._rank > 0:
            return
        if self._pending is not None:
            self._write(self._pending)
            self._pending = None
        self._file.write()

    def check_file(self) -> None:
        """Refuse, on rank 0, to continue without the file: a checkpoint would create the directory again, or be written into another run's.

        Raises:
            UserError: the run directory was removed or renamed, or another file has taken the place of metrics.jsonl.
        """
        if not self._path.is_file() or not os.path.samestat(self._path.stat(), self._file.stat()):
            rule = f"was removed or renamed while the run was writing to it: {FILE} is gone; no further checkpoint was written"
            fix = (
                "move the folder back if it was renamed, and run the same command again: it continues from the newest checkpoint in run_dir"
            )
            raise UserError.of("run_dir", self._run_dir, rule, fix)

    def validation(self, step: int, result: Validation, identity: Mapping[str, str], seconds: float) -> None:
        """Write the line of a validation: loss, its standard error, targets, bits per byte, more measures, and the same by corpus.

        Args:
            identity: of the data, Objective.identity.
            seconds: from the end of the step to that of the validation.
        """
        self.flush()
        if self._rank > 0:
            return
        corpora = {
            name: {"validation_loss": corpus.loss, "bits_per_byte": corpus.bits_per_byte, "validation_targets": corpus.targets}
            for name, corpus in result.corpora.items()
        }
        line = {
            "step": step,
            "validation_loss": result.loss,
            "validation_loss_stderr": result.standard_error,
            "validation_targets": result.targets,
            "validation_samples": result.samples,
            "validation_seconds": seconds,
            **identity,
            "bits_per_byte": result.bits_per_byte,
            **result.measures,
        }
        self._emit(line | ({"corpora": corpora} if corpora else {}))
        error = "" if not result.standard_error else f" +- {result.standard_error:.4f}"
        read = "the full split" if result.samples == result.available else f"{result.samples:,} of {result.available:,} samples"
        bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.4f} bits per byte"
        measures = "".join(f", {name} {value:.4f}" for name, value in result.measures.items())
        text = "step %d: validation loss %.4f%s on %s targets (%s)%s%s"
        log.info(text, step, result.loss, error, f"{result.targets:,}", read, bits, measures)
        for name, corpus in sorted(result.corpora.items(), key=lambda item: -item[1].targets)[:_LOGGED_CORPORA]:
            log.info("step %d, %s: validation loss %.4f on %s targets", step, name, corpus.loss, f"{corpus.targets:,}")
        if len(result.corpora) > _LOGGED_CORPORA:
            log.info("step %d: the other %d corpora are in %s", step, len(result.corpora) - _LOGGED_CORPORA, FILE)

    @property
    def last(self) -> dict[str, Any]:
        """The line of the last written step."""
        return self._last

    def _write(self, pending: _PendingStep) -> None:
        """Write the line of a step."""
        loss, norm, lr, skipped, *more = pending.values.values()
        self._skipped_before += int(skipped)
        rate = pending.samples * self._tokens_per_sample / pending.seconds
        step = pending.state.step
        self._last = {
            "step": step,
            "samples": pending.state.samples,
            "tokens": pending.state.samples * self._tokens_per_sample,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "skipped": self._skipped_before,
            "seconds": pending.seconds,
            "tokens_per_second": rate,
            "mfu": None if self._peak_flops is None else rate * self._flops_per_token / self._peak_flops,
            **self._noise.added(dict(zip(pending.names, more, strict=True)), pending.samples),
            **pending.more,
            **pending.memory,
            **self._removed,
        }
        self._emit(self._last)
        if skipped:
            log.warning("step %d was skipped: the gradient is not finite (%d skipped so far)", step, self._skipped_before)
        if step % self._log_every == 0 or step == self._steps:
            before, logged_step, since = self._last_log
            elapsed = max(time.monotonic() - since, 1e-9)
            mean = (pending.state.samples - before) * self._tokens_per_sample / elapsed
            left = timedelta(seconds=round(elapsed / (step - logged_step) * (self._steps - step)))
            self._last_log = (pending.state.samples, step, time.monotonic())
            log.info("step %d/%d loss %.4f norm %.3f lr %.2e %s tokens/s, %s left", step, self._steps, loss, norm, lr, f"{mean:,.0f}", left)

    def _emit(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(_finite(line), allow_nan=False))
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in line.items() if k != "step"}, step=line["step"])

    def __enter__(self) -> Metrics:
        self._bar = self._progress()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.__exit__(kind, error, trace)
        if self._rank > 0:
            return
        if kind is None:
            self.flush()
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if kind in (None, ToBeContinued) else 1)


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON does not have, by null."""
    return {
        key: _finite(value) if isinstance(value, dict) else None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
