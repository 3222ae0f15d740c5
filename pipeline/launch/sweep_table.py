"""A sweep, from Slurm and the files of its runs: its table, the best point first; what each point does; and jobs for those that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.common import metrics_file
from pipeline.common.atomic_files import atomic_file, write_json
from pipeline.common.errors import UserError
from pipeline.common.texts import table_lines
from pipeline.config import compose
from pipeline.config.command_line import quoted
from pipeline.config.rules import check
from pipeline.launch import moldable, slurm, sweep_manifest, sweep_submission
from pipeline.launch.sweep_manifest import SweepEntry, SweepManifest
from pipeline.launch.sweep_submission import SweepRun
from pipeline.report import comparison
from pipeline.report import run as runs
from pipeline.report.run import LOSS_STEPS, Run, State
from pipeline.report.table import plain

#: Files in the folder of the sweep.
MARKDOWN, JSON = "table.md", "table.json"
#: State of a point whose run directory has no file of a run.
NOT_STARTED = "not started"
#: States of a run whose end the manifest may know better: a point that was started again here, and failed before it wrote an event.
_ENDED = (State.STOPPED, State.FAILED, State.SILENT)
#: States of a run that needs a job.
_ALIVE = (State.RUNNING, State.STARTING)


@dataclass(frozen=True)
class Point:
    """A run of a sweep.

    Attributes:
        values: the settings that differ between the points, "key=value".
        steps: training.steps; None for a stage that does not train.
        state: what is known beside the files of the run: why it failed, or that it is in a queue; empty for nothing.
    """

    run_dir: Path
    values: tuple[str, ...]
    steps: int | None
    state: str = ""


@dataclass(frozen=True)
class SweepRow:
    """A row of the table; None for what the run has not written.

    Attributes:
        values: as in Point.
        state: as in Point, else finished, the state of the run with "step N of M", or not started.
        step: last step.
        loss: mean training loss of the last steps, nats per target.
        validation_loss: that of the last validation, with its standard error; bits_per_byte of the same one.
        within_noise: whether the point may be as good as the first one (comparison.RankedRun).
        best_validation_loss: the lowest one, with its step.
        tokens_per_second: as in report/run.py, with which step and losses agree as well.
    """

    values: tuple[str, ...]
    state: str
    step: int | None
    loss: float | None
    validation_loss: float | None
    validation_loss_stderr: float | None
    bits_per_byte: float | None
    best_validation_loss: float | None
    best_step: int | None
    tokens_per_second: float | None
    run_dir: str
    within_noise: bool = False


def rows(points: Sequence[Point]) -> tuple[list[SweepRow], str]:
    """Return the rows, the best one first as comparison.compare sorts them, and which is best, in words; empty if none has a loss."""
    read_runs = [runs.read(point.run_dir) for point in points]
    places = comparison.compare(read_runs, [point.values for point in points], [point.run_dir.name for point in points])
    of_run = {run.run_dir: point for run, point in zip(read_runs, points, strict=True)}
    ordered = [replace(row(of_run[place.run.run_dir], place.run), within_noise=place.within_noise) for place in places]
    return ordered, comparison.verdict(places) if any(run.loss is not None for run in read_runs) else ""


def row(point: Point, run: Run) -> SweepRow:
    """Return the row of a point."""
    validations = metrics_file.columns(metrics_file.read(point.run_dir)).get("validation_loss", [])
    best = min(validations, key=lambda validation: validation[1], default=(None, None))
    step = run.step or None
    return SweepRow(
        values=point.values,
        state="; ".join(filter(None, (point.state or _state(point, run), run.trouble))),
        step=step,
        loss=run.loss,
        validation_loss=run.validation_loss,
        validation_loss_stderr=run.validation_loss_stderr,
        bits_per_byte=run.bits_per_byte,
        best_validation_loss=best[1],
        best_step=best[0],
        tokens_per_second=run.tokens_per_second,
        run_dir=str(point.run_dir),
    )


def _state(point: Point, run: Run) -> str:
    """How far a run is, by its files."""
    if point.steps is not None and sweep_submission.is_finished(point.run_dir, point.steps):
        return "finished"
    if point.steps is None or not run.step:
        return NOT_STARTED
    progress = f"step {run.step:,} of {point.steps:,}"
    return f"{run.state}: {progress}" if run.starts else progress


def write(folder: Path, points: Sequence[Point]) -> str:
    """Write table.md and table.json to the folder of a sweep, and return the table as text."""
    table, verdict = rows(points)
    write_json(folder / JSON, [{name: plain(value) for name, value in asdict(row).items()} for row in table], allow_nan=False)
    head, cells = _cells(table)
    with atomic_file(folder / MARKDOWN, "w") as handle:
        for line in (head, ["---"] * len(head), *cells):
            handle.write(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n")
        handle.write(f"\n{verdict}\n" if verdict else "")
    return "\n".join(filter(None, [*table_lines([head, *cells]), verdict]))


def _cells(rows: Sequence[SweepRow]) -> tuple[list[str], list[list[str]]]:
    """The head of the table and its cells; a column that no run has a value for is left out."""
    keys = list(dict.fromkeys(value.partition("=")[0] for row in rows for value in row.values))
    columns: dict[str, list[str]] = {key: [dict(v.partition("=")[::2] for v in row.values).get(key, "") for row in rows] for key in keys}
    columns["validation loss"] = [_loss_text(row.validation_loss, row.validation_loss_stderr) for row in rows]
    columns["bits per byte"] = ["" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}" for row in rows]
    columns["best (step)"] = ["" if row.best_step is None else f"{row.best_validation_loss:.4f} ({row.best_step:,})" for row in rows]
    columns[f"training loss (last {LOSS_STEPS})"] = ["" if row.loss is None else f"{row.loss:.4f}" for row in rows]
    columns["steps"] = ["" if row.step is None else f"{row.step:,}" for row in rows]
    columns["tokens/s"] = ["" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}" for row in rows]
    columns["in the noise"] = ["yes" if row.within_noise and number else "" for number, row in enumerate(rows)]
    columns["state"] = [row.state for row in rows]
    columns["run_dir"] = [row.run_dir for row in rows]
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return list(shown), [list(line) for line in zip(*shown.values(), strict=True)]


def _loss_text(loss: float | None, error: float | None) -> str:
    """A loss with its standard error, if it has one."""
    return "" if loss is None else f"{loss:.4f}" + (f" +- {error:.4f}" if error else "")


@dataclass(frozen=True)
class PointState:
    """A point at this moment.

    Attributes:
        values: the settings that differ between the points.
        state: what Slurm says of its newest job (pending, with the reason; running), else what the files of its run say.
        reason: why, in one line.
        run: the numbers of its run; None if it has not begun.
    """

    entry: SweepEntry
    values: tuple[str, ...]
    state: str
    reason: str
    run: Run | None


def read_states(manifest: SweepManifest) -> list[PointState]:
    """Return the points of a sweep, in the order of their numbers. Without an answer of Slurm, the files of the runs tell alone."""
    entries, values = manifest.sorted(), manifest.differing()
    queue = _queue() if any(entry.job is not None for entry in entries) else None
    states = []
    for entry in entries:
        folder = Path(entry.run_dir)
        run = runs.read(folder) if (folder / "config.yaml").exists() or (folder / "events.jsonl").exists() else None
        state, reason = (queue or {}).get(entry.job or -1) or _without_job(entry, run)
        if run is not None and queue is not None and (job := _job_of(run)) is not None and int(job) not in queue:
            state, reason = str(State.FAILED), f"job {job} ended without a record: killed, or its first node was lost"
        states.append(PointState(entry, values[entry.id], state, reason, run))
    return states


def _job_of(run: Run) -> str | None:
    """The job that a run needs, as its files say; None if it does not run, or runs outside of Slurm."""
    jobs = run.life.jobs
    last = run.starts[-1].job if run.starts else jobs[-1] if jobs else None
    return last.id if last is not None and run.state in _ALIVE else None


def _without_job(entry: SweepEntry, run: Run | None) -> tuple[str, str]:
    """State and reason of a point that has no job in the queue: what is recorded of its run on this machine, else what its files say."""
    if entry.outcome and (run is None or run.state in _ENDED):
        state, _, reason = entry.outcome.partition(": ")
        return state, reason
    if run is not None:
        return str(run.state), "; ".join(filter(None, (run.trouble, run.reason)))
    if entry.log is not None and Path(entry.log).is_file():
        return "ended", f"see {entry.log}"
    return NOT_STARTED, ""


def row_of(point: PointState) -> Point:
    """Return a point of an earlier command for the table of its sweep."""
    steps = None if point.run is None else point.run.steps
    state = "" if point.state == State.FINISHED and steps is not None else ": ".join(filter(None, (point.state, point.reason)))
    return Point(Path(point.entry.run_dir), point.values, steps, state)


def _queue() -> dict[int, tuple[str, str]] | None:
    """The jobs of this user that wait or run: id -> state and reason; None if Slurm does not answer."""
    try:
        printed = slurm.command(["squeue", "--me", "--noheader", "--format=%A|%T|%r"])
    except slurm.SlurmError:
        return None
    lines = (line.split("|", 2) for line in printed.splitlines() if line.count("|") >= 2)
    return {int(number): (state.lower(), "" if reason == "None" else reason) for number, state, reason in lines}


def resubmit(manifest: SweepManifest, numbers: Sequence[int], arguments: Sequence[str], at_once: int | None) -> list[SweepRun]:
    """Submit the points that are neither finished nor in the queue, with the configuration files as they are now.

    Args:
        numbers: only these points; empty for all.
        arguments: the command, for the snapshot.
        at_once: as of sweep_submission.submit.

    Returns:
        The points, with their new states.

    Raises:
        UserError: a point is not valid any more, or Slurm rejects its job. No job is left.
    """
    compose.register()
    folders = [Path(folder) for folder in manifest.config_dirs]
    points = []
    for entry in manifest.sorted():
        if numbers and entry.number not in numbers:
            continue
        words = (*entry.options, *entry.overrides)
        overrides = [*compose.folder_options(folders), *words, f"run_dir={quoted(entry.run_dir)}"]
        config = compose.recompose(overrides)
        check.check(*moldable.expected(config, overrides, words))
        points.append(SweepRun(entry, config, words))
    sweep_submission.refuse(points, folders, at_once)
    sweep_submission.submit(points, manifest, folders, arguments, at_once)
    return points


def cancel(manifest: SweepManifest) -> list[int]:
    """Cancel the jobs of a sweep that wait or run, which is recorded in its manifest, and return their ids.

    Raises:
        slurm.SlurmError: scancel failed.
    """
    submitted = {entry.job for entry in manifest.entries.values() if entry.job is not None}
    jobs = sorted(submitted & set(_queue() or {}))
    if jobs:
        slurm.command(["scancel", *map(str, jobs)])
        for entry in manifest.sorted():
            if entry.job in jobs:
                manifest = manifest.with_outcome(entry.id, "canceled")
        manifest.write()
    return jobs


def manifest_of(folder: Path) -> SweepManifest:
    """Return the manifest of a sweep.

    Raises:
        UserError: the folder has none, or it is damaged.
    """
    manifest = sweep_manifest.read(folder)
    if not manifest.entries:
        fix = "name the run_dir of a sweep, the folder above those of its runs"
        rule = f"has a {sweep_manifest.NAME} without points" if (folder / sweep_manifest.NAME).exists() else f"has no {sweep_manifest.NAME}"
        raise UserError.of("SWEEP", str(folder), rule, fix)
    return manifest
