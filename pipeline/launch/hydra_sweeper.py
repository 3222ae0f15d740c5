"""What Hydra does for a sweep around its jobs: points are composed, run on this machine, and waited for by a search."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, open_dict

from pipeline.common.errors import RunFailed, ToBeContinued, UserError, Violation
from pipeline.common.ranks import Ranks
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch import in_use, submission, sweep_table
from pipeline.launch.submission import QueuedJob
from pipeline.launch.sweep_manifest import SweepManifest
from pipeline.launch.sweep_submission import SweepRun
from pipeline.launch.sweep_table import Point
from pipeline.report import run as runs
from pipeline.report.run_files import is_finite

log = logging.getLogger("pipeline")

#: The settings of the newest command, in the folder of a sweep.
FILE = "multirun.yaml"

Load = Callable[[DictConfig, list[str]], DictConfig]
#: Settings with which points may have different tokenizers.
_TOKENS = ("tokenizer", "data.tokens", "data.blend", "model.vocab_size")
#: Seconds between the first looks at the queue, and between all later ones.
_FIRST, _LATER = (1.0, 2.0, 4.0, 8.0, 15.0), 30.0


class MultirunFile:
    """multirun.yaml of a sweep that is refused, or only shown: it is removed, or is again that of the command before.

    Attributes:
        started: whether the sweep has begun, so that the file stays.
    """

    def __init__(self, folder: Path) -> None:
        self.started = False
        self._path = folder / FILE
        self._before = self._path.read_bytes() if self._path.is_file() else None
        self._new = [path for path in (folder, *folder.parents) if not path.exists()]

    @contextmanager
    def removed_unless_started(self) -> Iterator[None]:
        """Undo what the sweeper has written at the end of the block, unless the sweep has begun."""
        try:
            yield
        finally:
            if not self.started:
                self._undo()

    def _undo(self) -> None:
        """Write or remove the file, and remove the folders that were made for it."""
        if self._before is not None:
            self._path.write_bytes(self._before)
            return
        self._path.unlink(missing_ok=True)
        for folder in self._new:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def compose_once(load: Load, multirun: MultirunFile) -> Load:
    """Return a function that composes each point once: the sweeper composes all of them, and then the launcher needs them.

    Args:
        load: composes a point; a point that does not compose ends the sweep.
    """
    kept: dict[tuple[str, ...], DictConfig] = {}

    def load_once(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        key = tuple(sweep_overrides)
        if key in kept:
            return kept.pop(key)
        try:
            return kept.setdefault(key, load(master_config, sweep_overrides))
        except BaseException:
            with multirun.removed_unless_started():
                raise

    return load_once


def execute(
    points: Sequence[Point], runs: Sequence[Callable[[], JobReturn]], ranks: Ranks, record: Callable[[int, str], None]
) -> tuple[list[Point], int]:
    """Execute runs, and return their points with the reason of each failure, and the exit code of the first one, 0 for none.

    A run that fails does not end the sweep of a single process; several ranks could disagree on whether one has failed. A run that was
    asked to stop ends the sweep.

    Args:
        runs: execute one each.
        ranks: of this process; rank 0 prints.
        record: gets the place of each run when it begins, with an empty text, and when it ends, with its state.
    """
    done: list[Point] = []
    code, goes_on = 0, True
    for number, (point, run) in enumerate(zip(points, runs, strict=True), start=1):
        if not goes_on:
            done.append(point)
            continue
        if ranks.rank == 0:
            shown = f"sweep, {number} of {len(points)}: {' '.join(point.values)}".rstrip()
            print(f"{shown} ({point.run_dir})", file=sys.stderr, flush=True)
        record(number - 1, "")
        reason, ended, asked_to_stop = _ending_of(run)
        code = code or ended
        goes_on = not ended or (not asked_to_stop and ranks.world_size == 1)
        finished = "finished" if point.steps is None and not ended else ""  # the files of a training run say how far it is
        done.append(dataclasses.replace(point, state=reason or finished))
        record(number - 1, done[-1].state)
    return done, code


def _ending_of(run: Callable[[], JobReturn]) -> tuple[str, int, bool]:
    """Execute a run: why it failed, empty if it did not, its exit code, and whether it was asked to stop.

    The entry point has printed the errors of users, and this function prints others.
    """
    try:
        result = run()
    except SystemExit as end:
        if isinstance(end.__context__, ToBeContinued):
            return "", end.__context__.code, True
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return (f"failed: {_reason(end.__context__)}" if code else ""), code, False
    if result.status is not JobStatus.FAILED:
        return "", 0, False
    error = result._return_value  # the property raises it
    traceback.print_exception(error)
    return f"failed: {_reason(error)}", 1, False


def _reason(error: BaseException | None) -> str:
    """The first problem of an error on one line."""
    if isinstance(error, UserError):
        first = error.violations[0]
        return f"{first.key}={first.value}: {first.rule}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def points_of(runs: Sequence[SweepRun], manifest: SweepManifest, states: Sequence[str] | None = None) -> list[Point]:
    """Return the runs as points of the table, with the settings that not all points of the sweep have.

    Args:
        states: of the runs; default: their files tell.
    """
    values = manifest.differing()
    points = []
    for run, state in zip(runs, states or [""] * len(runs), strict=True):
        steps = run.config.training.steps if run.config.stage.name in TRAINING_STAGES else None
        points.append(Point(Path(run.config.run_dir), values[run.entry.id], steps, state))
    return points


def check_fork(config: RunConfig) -> None:
    """Refuse a point whose checkpoint.fork is not there, except in a dry run, or if its job waits for another one, which may write it.

    Raises:
        UserError: see there; or no step is left to train.
    """
    waits = any(option.startswith(("--dependency", "-d")) for option in config.cluster.sbatch)
    if config.stage.name in TRAINING_STAGES and config.checkpoint.fork is not None and not (waits or config.dry_run.enabled):
        from pipeline.training import starting_checkpoint as starting  # loads torch

        starting.parent_of(config, starting.starting_checkpoint(Path(config.run_dir), config.checkpoint))


def without_hydra(composed: DictConfig) -> DictConfig:
    """Return the configuration without the node hydra."""
    task = copy.deepcopy(composed)
    with open_dict(task):
        del task["hydra"]
    return task


def searches(config: DictConfig) -> bool:
    """Whether the sweeper chooses further points by the results of others, as Optuna's does; Hydra's own runs a list of points."""
    return not str(config.hydra.sweeper.get("_target_", "")).endswith(".BasicSweeper")


def search_violations(config: DictConfig, world_size: int) -> Iterator[Violation]:
    """Yield why a sweeper that searches cannot: several ranks, which would choose different points, or a dry run."""
    sweeper = str(config.hydra.sweeper.get("_target_", "")).rpartition(".")[2]
    if searches(config) and world_size > 1:
        rule = f"chooses points of its own in each of {world_size} ranks"
        yield Violation("hydra/sweeper", sweeper, rule, "start one process, and let hydra/launcher=slurm submit the runs")
    if searches(config) and config.dry_run.get("enabled"):
        yield Violation("dry_run.enabled", True, f"has no result that {sweeper} could learn from", "remove one of both")


def per_byte(config: DictConfig) -> bool:
    """Whether a search chooses among tokenizers or their tokens, so that losses per token of its points cannot be compared."""
    chosen = [word for word in config.hydra.overrides.task if re.search(r"[,(]", word)]
    return any(str(key).lstrip("+").startswith(_TOKENS) for key in (*chosen, *(config.hydra.sweeper.get("params") or ())))


def result(point: sweep_table.Point, overrides: Sequence[str], *, per_byte: bool) -> JobReturn:
    """Return the result of a run that has ended: its last validation loss, or why it has none.

    Args:
        per_byte: whether the result is bits per byte of text.
    """
    row = sweep_table.row(point, runs.read(point.run_dir))
    value = row.bits_per_byte if per_byte else row.validation_loss
    if row.state == "finished" and is_finite(value):
        return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=value)
    missing = "bits per byte of the validation split" if per_byte and row.validation_loss is not None else "validation loss"
    why = row.state if row.state != "finished" else f"it has no {missing}; set training.validate_every"
    return JobReturn(overrides=overrides, status=JobStatus.FAILED, _return_value=RunFailed(f"{row.run_dir}: {why}"))


def wait_for(points: Sequence[SweepRun], manifest: SweepManifest, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until no job of the points is in the queue, also those with which a run continues. If Slurm does not answer, ask again later."""
    log.info("waiting for %d jobs; after Ctrl-C they remain, and the same command waits for them again", len(points))
    for seconds in chain(_FIRST, repeat(_LATER)):
        try:
            queue = submission.queue()
        except UserError as error:
            log.warning("%s", error)
        else:
            if not any(_is_queued(point, manifest, queue) for point in points):
                return
        sleep(seconds)


def _is_queued(point: SweepRun, manifest: SweepManifest, queue: Sequence[QueuedJob]) -> bool:
    job = manifest.entries[point.entry.id].job
    return any(queued.number == job for queued in queue) or bool(in_use.queued(Path(point.entry.run_dir), [point.config.stage.name], queue))
