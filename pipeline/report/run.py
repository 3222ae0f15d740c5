"""The numbers of a training run at this moment, from the end of its files: what status, watch, report and comparisons print."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipeline.common import metrics_file
from pipeline.common.errors import STOPPED
from pipeline.report import run_files
from pipeline.report.run_files import is_finite
from pipeline.report.starts import Life, Start, life_of

#: Steps at the end of a run over which its training loss is averaged, and those over which its speed is.
LOSS_STEPS, SPEED_STEPS = 20, 100
#: Minutes besides training.timeout_minutes after which a run that writes nothing is not alive: its watchdog would have ended it.
GRACE_MINUTES = 2.0
#: Seconds after the end of rank 0, or a question to Slurm, in which what follows is recorded.
LEAVING = 180.0
#: training.timeout_minutes of runs that do not tell it.
_TIMEOUT_MINUTES = 10.0


class State(StrEnum):
    """What a run does.

    RUNNING: it writes. STARTING: its ranks or its job have begun, and no step is written yet. QUEUED: its job is back in the queue, or the
    next one of a chain waits. FINISHED: all steps are made. STOPPED: it ended as it was asked to, and the same command continues it.
    FAILED: it ended by an error. SILENT: no end is recorded, and nothing was written for longer than training.timeout_minutes: it was
    killed, or its node was lost.
    """

    RUNNING = "running"
    STARTING = "starting"
    QUEUED = "queued"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    SILENT = "silent"


@dataclass(frozen=True)
class Run:
    """A run; None for what its files do not tell.

    Attributes:
        reason: why it is in that state, in one line.
        stage: pretrain or finetune.
        step: the last step in metrics.jsonl, 0 for none.
        steps: training.steps.
        tokens: training tokens seen up to this step.
        samples: samples seen up to this step.
        loss: mean training loss of the last LOSS_STEPS steps, nats per target; not a number if one of them has no finite loss.
        not_finite: how many of them have none.
        grad_norm: of the last step.
        validation_loss: of the last validation, nats per target. Up to 4 MB of metrics.jsonl are searched for it, about 10,000 steps.
        validation_loss_stderr: its standard error, from reading a sample of the split.
        validation_step: its step.
        validation_samples: number of sequences that it read.
        validation_data: of which text or examples, a short text; equal for one text with different tokenizers.
        tokenizer: checksum of the tokenizer of that data.
        bits_per_byte: of the last validation; None if the loss does not cover all of the text.
        tokens_per_second: median of the last SPEED_STEPS steps.
        seconds_per_step: mean of the last SPEED_STEPS steps.
        seconds_left: seconds_per_step times the steps that are left, of a run that is running. Validations, saves, the queue and further
            restarts are not counted.
        limit: end of the time limit of its job, seconds since 1970; None if it has no job at this moment.
        restarts: number of starts of its ranks after the first one.
        starts: each start of its ranks.
        node_hours: of its jobs, from the time that Slurm gives for their start to their last recorded action, spares and start-up included;
            outside of Slurm, of its starts. None for runs without events.
        nodes: number of nodes of the last start.
        job: id of its last Slurm job.
        skipped: steps that were skipped, because their gradient was not finite.
        save_failures: checkpoints in a row that could not be written.
        error: reason of the last start that failed, with its place.
        last_sign: when the run last wrote an event or a step, seconds since 1970: the time of its last event if its end is recorded, else
            also that of the last change of metrics.jsonl.
        problems: files and lines that are damaged or missing.
    """

    run_dir: str
    state: State
    reason: str
    stage: str | None = None
    step: int = 0
    steps: int | None = None
    tokens: int | None = None
    samples: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    validation_loss: float | None = None
    validation_loss_stderr: float | None = None
    validation_step: int | None = None
    validation_samples: int | None = None
    validation_data: str | None = None
    tokenizer: str | None = None
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    limit: float | None = None
    restarts: int = 0
    starts: tuple[Start, ...] = ()
    node_hours: float | None = None
    nodes: int | None = None
    job: str | None = None
    skipped: int | None = None
    save_failures: int | None = None
    error: str | None = None
    last_sign: float | None = None
    life: Life = field(default_factory=lambda: life_of([]))
    problems: tuple[str, ...] = ()
    not_finite: int = 0

    @property
    def trouble(self) -> str:
        """What a person must know before the numbers of the run are compared; empty for nothing."""
        return f"no finite loss in {self.not_finite} of the last {LOSS_STEPS} steps" if self.not_finite else ""


def read(run_dir: Path, now: float | None = None) -> Run:
    """Read a run.

    Args:
        run_dir: its run directory, which may lack any file.
        now: seconds since 1970; default: the time of the call.
    """
    now = time.time() if now is None else now
    config, config_problems = run_files.read_config(run_dir)
    manifest, manifest_problems = run_files.read_manifest(run_dir)
    events = run_files.read_events(run_dir)
    training = _mapping(config.get("training"))
    lines = run_files.read_last_metrics(run_dir, validations=training.get("validate_every") != 0)
    life = life_of(events.content)
    written = run_files.changed(run_dir, metrics_file.FILE)
    last_sign = life.last if life.ended else max((sign for sign in (life.last, written) if sign is not None), default=None)
    numbers = _numbers(lines.content)
    steps = training.get("steps") if isinstance(training.get("steps"), int) else None
    done = None if manifest is None else manifest["totals"].get("step")
    incomplete = []
    if isinstance(done, int) and (steps is None or done >= steps):
        state, reason = State.FINISHED, f"{done:,} steps"
        if numbers["step"] < done:
            end = f"ends at step {numbers['step']:,}" if numbers["step"] else "is missing, or has no step"
            incomplete = [f"{metrics_file.FILE} {end}, and the run at step {done:,}"]
            numbers["step"] = done
    else:
        minutes = training.get("timeout_minutes")
        patience = 60 * (GRACE_MINUTES + (minutes if isinstance(minutes, int | float) else _TIMEOUT_MINUTES))
        state, reason = _state(life, written if numbers["step"] else None, last_sign, now, patience)
        if state is State.STOPPED and life.starts and life.starts[-1].code == 0 and steps is not None and numbers["step"] >= steps:
            state, reason = State.FINISHED, f"{numbers['step']:,} steps"  # its manifest is damaged or was removed
    job = life.jobs[-1] if life.jobs else None
    per_step = numbers["seconds_per_step"]
    left = None if state is not State.RUNNING or steps is None or per_step is None else max(steps - numbers["step"], 0) * per_step
    failed = [start for start in life.starts if start.failed]
    last = life.starts[-1] if life.starts else None
    return Run(
        run_dir=str(run_dir),
        state=state,
        reason=reason,
        stage=_mapping(config.get("stage")).get("name"),
        steps=steps,
        **numbers,
        seconds_left=left,
        limit=None if job is None or job.end is not None else job.limit,
        restarts=max(len(life.starts) - 1, 0),
        starts=life.starts,
        node_hours=node_hours(life, last_sign),
        nodes=len(last.nodes) or None if last is not None else None,
        job=None if job is None else job.id,
        error=f"{failed[-1].reason}{f' ({failed[-1].place})' if failed[-1].place else ''}" if failed else None,
        last_sign=last_sign,
        life=life,
        problems=(
            *config_problems,
            *manifest_problems,
            *events.problems,
            *lines.problems,
            *incomplete,
            *life.problems,
            *_missing(life, config),
        ),
    )


def _missing(life: Life, config: dict[str, Any]) -> list[str]:
    """What an older version did not write."""
    missing = [] if life.starts else ["events.jsonl has no start of this run: starts, reasons and node-hours are not known"]
    return missing if config else [*missing, "config.yaml is missing or damaged: the number of steps is not known"]


def node_hours(life: Life, last_sign: float | None) -> float | None:
    """Return the node-hours of the jobs of a run, and of its starts outside of Slurm; None without events.

    Args:
        last_sign: seconds since 1970, to which what has no end yet is counted.
    """
    if not life.starts and not life.jobs:
        return None
    until = last_sign or 0.0
    seconds = sum(job.node_seconds(until) for job in life.jobs)
    alone = [start for start in life.starts if start.job is None]
    seconds += sum(max(len(start.nodes), 1) * max((until if start.end is None else start.end) - start.begin, 0) for start in alone)
    return seconds / 3600


def _state(life: Life, written: float | None, last_sign: float | None, now: float, patience: float) -> tuple[State, str]:
    """The state of a run that has not finished, and why.

    Args:
        written: when metrics.jsonl was last written; None without a step.
        last_sign: when any of its files was.
        now: seconds since 1970.
        patience: seconds without a sign that a run that is alive may have.
    """
    start, job = life.starts[-1] if life.starts else None, life.jobs[-1] if life.jobs else None
    goes_on = (start is not None and start.end is None) or (job is not None and job.end is None)
    if goes_on or last_sign is None or not (life.starts or life.jobs):
        age = math.inf if last_sign is None else now - last_sign
        if age > LEAVING and job is not None and job.end is None and (job.asked or (start is not None and start.leaves)):
            asked = f"Slurm was asked to put job {job.id} back into the queue ({job.asked}), and no answer is recorded"
            ended = "" if start is None else f"the ranks have ended ({start.reason}), and what follows is not recorded"
            return State.SILENT, f"{asked if job.asked else ended}: squeue tells whether job {job.id} waits"
        if age > patience:
            return State.SILENT, f"wrote nothing for {duration(age)}, and no end is recorded" if last_sign else "its files have no step yet"
        began = 0.0 if start is None else start.ready or start.begin
        if written is None or written < began or (start is not None and start.end is not None):
            return State.STARTING, "no step since the last start"
        return State.RUNNING, f"last written {duration(age)} ago"
    if job is not None and (start is None or start.job is not None or job.begin > start.begin):
        if job.action in ("requeue", "requeued", "chain"):
            return State.QUEUED, f"{job.reason}; not on {', '.join(job.exclude)}" if job.exclude else job.reason
        code, reason = job.code, job.reason
    else:
        assert start is not None
        code, reason = start.code, start.reason
    if code == 0:
        return State.STOPPED, "ended with exit code 0 before all steps were made"
    return (State.STOPPED if code in STOPPED else State.FAILED), reason


def duration(seconds: float) -> str:
    """Return a time span in words: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    if not math.isfinite(seconds):
        return "an unknown time"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 36:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def _numbers(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of the last lines of metrics.jsonl."""
    steps = [line for line in lines if "loss" in line]
    losses = [line["loss"] if is_finite(line["loss"]) else math.nan for line in steps[-LOSS_STEPS:]]
    recent = steps[-SPEED_STEPS:]
    seconds = [line["seconds"] for line in recent if is_finite(line.get("seconds"))]
    rates = [line["tokens_per_second"] for line in recent if is_finite(line.get("tokens_per_second"))]
    validations = [line for line in lines if isinstance(line.get("validation_loss"), int | float)]
    validation = validations[-1] if validations else {}
    last = steps[-1] if steps else {}
    error = validation.get("validation_loss_stderr")
    return {
        "step": last.get("step", 0),
        "tokens": last.get("tokens"),
        "samples": last.get("samples"),
        "loss": statistics.fmean(losses) if losses else None,
        "not_finite": sum(math.isnan(loss) for loss in losses),
        "grad_norm": last.get("grad_norm"),
        "validation_loss": validation.get("validation_loss"),
        "validation_loss_stderr": error if is_finite(error) else None,
        "validation_step": validation.get("step"),
        **{name: validation.get(name) for name in ("validation_samples", "validation_data", "tokenizer", "bits_per_byte")},
        "tokens_per_second": statistics.median(rates) if rates else None,
        "seconds_per_step": statistics.fmean(seconds) if seconds else None,
        "skipped": last.get("skipped"),
        "save_failures": last.get("save_failures"),
    }


def _mapping(value: object) -> dict[str, Any]:
    """A value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}
