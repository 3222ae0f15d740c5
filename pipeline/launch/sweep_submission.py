"""The jobs of a sweep: those of points that are neither finished nor in the queue are checked, submitted and recorded.

Nothing waits for them.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from omegaconf import DictConfig

from pipeline.common import locks
from pipeline.common.artifact import MANIFEST
from pipeline.common.atomic_files import make_folder
from pipeline.common.errors import UserError, Violation
from pipeline.config import compose
from pipeline.config.cluster import ClusterConfig
from pipeline.config.command_line import quoted
from pipeline.config.schema import RunConfig
from pipeline.launch import in_use, job, moldable, slurm, snapshot, submission
from pipeline.launch.sweep_manifest import SweepEntry, SweepManifest

log = logging.getLogger("pipeline")

#: What Slurm says when a user has as many jobs in the queue as allowed.
_LIMIT = r"MaxSubmitJob|MaxJobCount|temporarily unable to accept"


@dataclass
class SweepRun:
    """A point of a command, and its job.

    Attributes:
        words: overrides in the order of the command line, without those of Hydra itself.
        composed: what Hydra has composed, with the run_dir of this run; None for a point that is submitted again.
        state: finished, queued, or its new job; empty while it is to be submitted.
        text: the script of the job.
    """

    entry: SweepEntry
    config: RunConfig
    words: tuple[str, ...]
    composed: DictConfig | None = None
    state: str = ""
    text: str = ""

    @cached_property
    def options(self) -> ClusterConfig:
        """The sbatch options of the job."""
        return moldable.job_options(self.config, self.words)


def refuse(points: Sequence[SweepRun], config_dirs: Sequence[Path], at_once: int | None, also: Iterable[Violation] = ()) -> None:
    """Refuse points whose jobs cannot be submitted, as far as it is known without asking Slurm.

    Args:
        config_dirs: folders of --config-dir.
        at_once: as of `submit`.

    Raises:
        UserError: with all violations.
    """
    violations = list(also)
    if not any(point.config.dry_run.enabled for point in points):
        violations += [*submission.absent(), *(v for point in points for v in job.not_given(point.options))]
    for point in points:
        words = [*compose.folder_options(config_dirs), *point.words]
        violations += job.violations(point.options, point.config.stage.name, Path.cwd())
        violations += moldable.violations(point.config, words)
        violations += moldable.memory_violations(point.config, words)
        dependencies = [option for option in point.options.sbatch if re.match(r"--dependency\b|-d\b", option)]
        if at_once is not None and dependencies:
            rule = f"would replace the dependencies between the jobs of hydra.launcher.at_once={at_once}"
            violations.append(Violation("cluster.sbatch", dependencies[0], rule, "remove one of both"))
    if at_once is not None and at_once < 1:
        fix = "set the number of jobs that may run at a time"
        violations.append(Violation("hydra.launcher.at_once", at_once, "must be at least 1", fix))
    UserError.raise_for(violations)
    for text in {text for point in points if (text := moldable.idle_text(point.config))}:
        log.warning("%s", text)


def render(points: Sequence[SweepRun], manifest: SweepManifest, config_dirs: Sequence[Path], at_once: int | None) -> tuple[Path, Path]:
    """Render the jobs of points, with names in place of the ids of the jobs that they wait for.

    Returns:
        The folders for the copy of the configuration files and for the snapshot that the jobs name.
    """
    conf, taken = snapshot.hashed(manifest.folder, config_dirs), snapshot.path(manifest.folder)
    for place, point in enumerate(points):
        before = f"JOB_OF_{points[place - at_once].entry.number}" if at_once is not None and place >= at_once else None
        point.text = job.render(_job(point, manifest.folder, conf, taken, before), point.options)
    return conf, taken


def submit(
    points: Sequence[SweepRun], manifest: SweepManifest, config_dirs: Sequence[Path], arguments: Sequence[str], at_once: int | None = None
) -> SweepManifest:
    """Submit the jobs of valid points that are neither finished nor in the queue, and set the state of every point.

    If Slurm rejects a job, those submitted before it are canceled; if it has reached its limit of jobs, they remain.

    Args:
        points: of the sweep, or some of them.
        manifest: of the sweep; points that it lacks are added.
        config_dirs: folders of --config-dir.
        arguments: the command, for the snapshot.
        at_once: at most so many of the submitted jobs run at a time; each later one waits for the end of an earlier one. None: all of them.

    Returns:
        The manifest, which is written.

    Raises:
        UserError: a point is in use by another job, Slurm is not there or rejects a job, or the disk is full. No job is left.
    """
    make_folder(manifest.folder / snapshot.FOLDER)
    with locks.claimed(manifest.folder / snapshot.FOLDER, "run_dir"):  # two commands at the same time
        queue = submission.queue()
        for point in points:
            point.state = _state(point, manifest.entries.get(point.entry.id), {queued.number for queued in queue})
        new = [point for point in points if not point.state]
        UserError.raise_for(v for run in new for v in in_use.violations(Path(run.entry.run_dir), [run.config.stage.name], queue))
        conf, taken = render(new, manifest, config_dirs, at_once)
        UserError.raise_for(submission.rejected([point.text for point in new]).values())
        for point in points:
            manifest = manifest.with_point(point.entry)
        for point in new:
            make_folder(Path(point.entry.run_dir))  # Slurm opens the log file in it when the job starts
        if new:
            snapshot.write_conf_copy(conf, config_dirs)
            names = [str(point.entry.number) for point in new]
            configs = dict(zip(names, (snapshot.resolved(point.config) for point in new), strict=True))
            snapshot.write(taken, arguments, configs, dict(zip(names, (point.text for point in new), strict=True)))
        numbers = _submitted(new, manifest.folder, conf, taken, at_once)
        for point, number in zip(new, numbers, strict=False):
            point.state = f"job {number}"
            manifest = manifest.with_job(point.entry.id, number, job.log_file(Path(point.entry.run_dir), "slurm", number))
        for point in new[len(numbers) :]:
            point.state = "not submitted"
        if len(numbers) < len(new):
            log.warning(
                "Slurm accepts no more jobs of this user: the same command submits the other %d points later", len(new) - len(numbers)
            )
        try:
            manifest.write()
        except BaseException:  # the jobs would be unknown to the next command
            slurm.cancel(*numbers)
            raise
    return manifest


def _submitted(new: Sequence[SweepRun], folder: Path, conf: Path, taken: Path, at_once: int | None) -> list[int]:
    """Submit the jobs, and return their ids: less than there are points at the limit of Slurm. Without jobs, there is no snapshot."""

    def text(number: int, job_ids: Sequence[int]) -> str:
        before = str(job_ids[number - at_once]) if at_once is not None and number >= at_once else None
        return job.render(_job(new[number], folder, conf, taken, before), new[number].options)

    try:
        return submission.submit_all([partial(text, number) for number in range(len(new))], limit=_LIMIT)
    except BaseException:
        shutil.rmtree(taken, ignore_errors=True)
        raise


def _state(point: SweepRun, before: SweepEntry | None, queue: Iterable[int]) -> str:
    """The state of a point: finished, queued, or empty if it is to be submitted."""
    if before is not None and before.job is not None and before.job in queue:
        return f"queued as job {before.job}"
    return "finished" if is_finished(Path(point.entry.run_dir), point.config.training.steps) else ""


def is_finished(run_dir: Path, steps: int) -> bool:
    """Return whether a run has ended with all of its steps, by its manifest."""
    manifest = run_dir / MANIFEST
    return manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8"))["totals"].get("step", 0) >= steps


def _job(point: SweepRun, folder: Path, conf: Path, taken: Path, before: str | None = None) -> job.Job:
    """Create the Slurm job of a point. The stage is set by the script; run_dir is the last override."""
    overrides = [o for o in point.words if not re.match(r"\+*(stage=|run_dir=|dry_run[.=])", o)]
    return job.here(
        name=f"{re.sub(r'[^A-Za-z0-9_.-]', '_', folder.name)[:40]}-{point.entry.number}",
        stage=point.config.stage.name,
        overrides=(*overrides, f"run_dir={quoted(point.entry.run_dir)}"),
        output=job.log_file(Path(point.entry.run_dir), "slurm"),
        conf=conf,
        snapshot=taken,
        waits_for=before,
    )
