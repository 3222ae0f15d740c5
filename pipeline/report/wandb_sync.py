"""Sends the metrics of a run to Weights & Biases from a machine with internet access.

They are read from metrics.jsonl, in which every step is there once, however many jobs the run has had: the folders that its jobs left in
RUN/wandb are not needed, overlap where a job continued from a checkpoint, and lack what a killed job had not written to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.common import wandb_run
from pipeline.common.errors import UserError
from pipeline.report import run as runs
from pipeline.report import run_files
from pipeline.report.run import State


def send(run_dir: Path, folder: Path, mode: str = "online") -> tuple[int, int, tuple[str, ...]]:
    """Send the steps that Weights & Biases does not have yet to the one run of a run directory.

    The newest step of a run that still writes is left for the next call: its validation may follow.

    Args:
        folder: in which Weights & Biases writes its files; not the run directory, which may be read-only.
        mode: "online"; with "offline" a folder of all steps is written, for `wandb sync`.

    Returns:
        How many steps were sent, the last one (0 for none), and what in the files of the run could not be read.

    Raises:
        UserError: the folder has no run, the run sends its metrics itself, or Weights & Biases is not reached.
    """
    if not run_files.is_run(run_dir):
        raise UserError.of("RUN", run_dir, "has no training run", "name the run_dir of a run")
    config, problems = run_files.read_config(run_dir, whole=True)
    tracking = config.get("tracking") or {}
    writes = runs.read(run_dir).state in (State.RUNNING, State.STARTING)
    if writes and tracking.get("wandb") == "online":
        raise UserError.of("RUN", run_dir, "sends its metrics itself (tracking.wandb=online)", "run this command when its job has ended")
    lines = run_files.read_metrics(run_dir)
    steps = by_step(lines.content)
    if writes:
        steps = steps[:-1]
    run = wandb_run.start(run_dir, folder, mode, str(tracking.get("project") or "tannschen"), tracking.get("name"), config)
    new = [(step, values) for step, values in steps if step >= run.step]
    for step, values in new:
        run.log(values, step=step)
    run.finish(exit_code=0)
    return len(new), new[-1][0] if new else 0, (*problems, *lines.problems)


def by_step(lines: Iterable[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return the steps of metrics.jsonl, ascending, with the values of all lines of a step: a validation has a line of its own."""
    ordered = sorted(lines, key=lambda line: int(line["step"]))
    return [
        (step, {name: value for line in group for name, value in line.items() if name != "step" and value is not None})
        for step, group in groupby(ordered, key=lambda line: int(line["step"]))
    ]
