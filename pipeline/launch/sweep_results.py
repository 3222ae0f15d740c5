"""What a sweeper that searches minimizes, once the job of a run has ended: its last validation loss, or bits per byte."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from pipeline.common.errors import RunFailed, UserError, Violation
from pipeline.launch import in_use, sbatch, sweep_table
from pipeline.launch.sbatch import QueuedJob
from pipeline.launch.sweep_manifest import Manifest
from pipeline.launch.sweep_submission import Point
from pipeline.report import run as runs

log = logging.getLogger("pipeline")

#: Settings with which points may have different tokenizers.
_TOKENS = ("tokenizer", "data.tokens", "data.blend", "model.vocab_size")

#: Seconds between the first looks at the queue, and between all later ones.
_FIRST, _LATER = (1.0, 2.0, 4.0, 8.0, 15.0), 30.0


def searches(config: DictConfig) -> bool:
    """Whether the sweeper chooses further points by the results of others, as Optuna's does; Hydra's own runs a list of points."""
    return not str(config.hydra.sweeper.get("_target_", "")).endswith(".BasicSweeper")


def violations(config: DictConfig, world_size: int) -> Iterator[Violation]:
    """Yield why a sweeper that searches cannot: several ranks, which would choose different points, or a dry run.

    Args:
        config: of the sweep, composed by Hydra.
        world_size: ranks of this job.
    """
    sweeper = str(config.hydra.sweeper.get("_target_", "")).rpartition(".")[2]
    if searches(config) and world_size > 1:
        rule = f"chooses points of its own in each of {world_size} ranks"
        yield Violation("hydra/sweeper", sweeper, rule, "start one process, and let hydra/launcher=slurm submit the runs")
    if searches(config) and config.dry_run.get("enabled"):
        yield Violation("dry_run.enabled", True, f"has no result that {sweeper} could learn from", "remove one of both")


def per_byte(config: DictConfig) -> bool:
    """Whether a search chooses among tokenizers or their tokens, so that losses per token of its points cannot be compared.

    Args:
        config: of the sweep, composed by Hydra.
    """
    chosen = [word for word in config.hydra.overrides.task if re.search(r"[,(]", word)]
    return any(str(key).lstrip("+").startswith(_TOKENS) for key in (*chosen, *(config.hydra.sweeper.get("params") or ())))


def result(point: sweep_table.Point, overrides: Sequence[str], *, per_byte: bool) -> JobReturn:
    """Return the result of a run that has ended: its last validation loss, or why it has none.

    Args:
        point: the run.
        overrides: of Hydra.
        per_byte: whether the result is bits per byte of text.
    """
    row = sweep_table.row(point, runs.read(point.run_dir))
    value = row.bits_per_byte if per_byte else row.validation_loss
    if row.state == "finished" and runs.is_finite(value):
        return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=value)
    missing = "bits per byte of the validation split" if per_byte and row.validation_loss is not None else "validation loss"
    why = row.state if row.state != "finished" else f"it has no {missing}; set training.validate_every"
    return JobReturn(overrides=overrides, status=JobStatus.FAILED, _return_value=RunFailed(f"{row.run_dir}: {why}"))


def wait(points: Sequence[Point], manifest: Manifest, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until no job of the points is in the queue, also those with which a run continues. If Slurm does not answer, ask again later.

    Args:
        points: of the sweep.
        manifest: with their jobs.
        sleep: for tests.
    """
    log.info("waiting for %d jobs; after Ctrl-C they remain, and the same command waits for them again", len(points))
    for seconds in chain(_FIRST, repeat(_LATER)):
        try:
            queue = sbatch.queue()
        except UserError as error:
            log.warning("%s", error)
        else:
            if not any(_is_queued(point, manifest, queue) for point in points):
                return
        sleep(seconds)


def _is_queued(point: Point, manifest: Manifest, queue: Sequence[QueuedJob]) -> bool:
    """Whether a job trains a point, or will."""
    job = manifest.entries[point.entry.id].job
    return any(queued.number == job for queued in queue) or bool(in_use.queued(Path(point.entry.run_dir), [point.config.stage.name], queue))
