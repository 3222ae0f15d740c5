"""Hydra launchers for sweeps (`python -m pipeline -m`). All runs are validated before the first one starts.

The runs are executed sequentially in this process, or with `hydra/launcher=slurm` submitted as one Slurm job each. In that case
the process exits after the submission; no process monitors the jobs.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from pipeline.common import ranks
from pipeline.common.artifact import MANIFEST
from pipeline.common.atomic_files import atomic_file, make_folder, report_disk_full
from pipeline.common.errors import UserError, Violation
from pipeline.config import compose, layout
from pipeline.config.cluster import ClusterConfig
from pipeline.config.command_line import quoted
from pipeline.config.paths import batch_scripts
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch import conf_copy, in_use, job, job_memory, job_size, local_sweep, moldable, queues, sbatch, snapshot, sweep_table
from pipeline.launch.sweep_table import Point

log = logging.getLogger("pipeline")

#: Record of the submitted jobs in the sweep folder, one entry per run.
RECORD = in_use.SWEEP

#: Module name under which Hydra imports the plugins.
PLUGIN = "hydra_plugins.tannschen"


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        overrides: command-line overrides, without those of Hydra itself.
        composed: configuration composed by Hydra, with the run_dir of this run.
        config: the same configuration as dataclasses.
    """

    overrides: tuple[str, ...]
    composed: DictConfig
    config: RunConfig


@dataclass
class Submission:
    """The job of one run.

    Attributes:
        run: the run.
        text: the script of the job.
        state: finished, queued, or its new job; empty while it is to be submitted.
    """

    run: SweepRun
    text: str
    state: str = ""

    @property
    def name(self) -> str:
        """The number of the run, for file names."""
        return Path(self.run.config.run_dir).name


class ValidatingLauncher(Launcher):
    """Base class of the launchers: composes and validates the runs of a sweep."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the Hydra context. Called by Hydra before launch()."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sized(self, config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, int]:
        """Return the configuration of a run with its layout, and its number of ranks."""
        raise NotImplementedError

    def runs(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[SweepRun]:
        """Compose and validate all runs of the sweep.

        Raises:
            UserError: contains the violations of all runs, without duplicates.
        """
        setup_globals()
        found: list[SweepRun] = []
        violations: dict[str, Violation] = {}
        for number, overrides in enumerate(job_overrides, start=first):
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(composed):
                composed.hydra.job.id = composed.hydra.job.num = number
                composed.run_dir = str(Path(composed.hydra.sweep.dir) / str(composed.hydra.sweep.subdir))
            try:
                config = compose.to_run_config(_without_hydra(composed))
                check.check(*self.sized(config, filter_overrides(overrides)))
                found.append(SweepRun(tuple(filter_overrides(overrides)), composed, config))
            except UserError as error:
                violations |= {str(v): v for v in error.violations}
        if len({run.config.run_dir for run in found}) < len(found):
            fix = "set hydra.sweep.subdir to a value that differs between runs, for example ${hydra.job.num}"
            violations["run_dir"] = Violation("run_dir", found[0].config.run_dir, "is shared by several runs of the sweep", fix)
        if violations:
            raise UserError(list(violations.values()))
        return found


class LocalLauncher(ValidatingLauncher):
    """Executes the runs sequentially in this process, on all its ranks, and prints a table of them."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See ValidatingLauncher."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._done: list[Point] = []  # of earlier batches, with hydra.sweeper.max_batch_size

    def sized(self, config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, int]:
        """Return the number of ranks of this job, or the simulated ranks of a dry run."""
        config = moldable.simulated(config, overrides) if config.dry_run.enabled else config
        return config, layout.job_size(config, ranks.detect().world_size)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Execute the runs. Called by Hydra with the overrides of each run.

        Raises:
            SystemExit: a run has failed or was asked to stop, with the exit code of the first one.
        """
        runs, here = self.runs(job_overrides, initial_job_idx), ranks.detect()
        done, code = local_sweep.execute(_points(runs), [partial(self._execute, run) for run in runs], here)
        self._done += done
        if here.rank == 0 and not any(run.config.dry_run.enabled for run in runs):
            folder = Path(self.config.hydra.sweep.dir)
            print(f"{sweep_table.write(folder, self._done)}\nsee {folder / sweep_table.MARKDOWN}", flush=True)
        if code:
            sys.exit(code)
        return []

    def _execute(self, run: SweepRun) -> JobReturn:
        """Execute a run."""
        return run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=run.composed,
            job_dir_key="run_dir",
            job_subdir_key=None,
        )


class SlurmLauncher(ValidatingLauncher):
    """Submits each run as a Slurm job. If one submission fails, the jobs submitted before it are canceled."""

    def sized(self, config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, int]:
        """Return the layout and the number of ranks of the job of a run on as many nodes as it asks for."""
        return job_size.expected(config, self._words(overrides), overrides)

    def _words(self, overrides: Sequence[str]) -> list[str]:
        """The arguments of `python -m pipeline` on this machine, for a run with these overrides."""
        return [*(f"--config-dir={folder}" for folder in compose.own_folders(self.config.hydra)), *overrides]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit the runs, print the job ids and return. Called by Hydra with the overrides of each run."""
        runs = self.runs(job_overrides, initial_job_idx)
        folder = Path(self.config.hydra.sweep.dir)
        earlier = _read_record(folder / RECORD)
        self._check_submission(runs, earlier, folder)
        own = compose.own_folders(self.config.hydra)
        conf, taken = conf_copy.hashed(folder, own), snapshot.path(folder)
        submissions = [
            Submission(run, job.render(_job(run, number, conf, taken), _options(run)))
            for number, run in enumerate(runs, start=initial_job_idx)
        ]
        if any(run.config.dry_run.enabled for run in runs):
            print("\n".join(one.text for one in submissions), end="")
            return []
        queue = sbatch.queue()
        waiting = {queued.number for queued in queue}
        for one in submissions:
            one.state = _state(one.run.config.run_dir, one.run.config.training.steps, earlier.get(one.run.config.run_dir), waiting)
        new = [one for one in submissions if not one.state]
        if crowded := list(queues.too_many([_options(one.run) for one in new])):
            raise UserError(crowded)
        if used := [v for one in new for v in in_use.violations(Path(one.run.config.run_dir), [one.run.config.stage.name], queue)]:
            raise UserError(used)
        if found := sbatch.rejected([one.text for one in new]):
            raise UserError(list({str(v): v for v in found.values()}.values()))
        for one in new:
            make_folder(Path(one.run.config.run_dir))  # Slurm opens the log file in it when the job starts
        if new:
            conf_copy.write(conf, own)
            configs = {one.name: snapshot.resolved(one.run.config) for one in new}
            snapshot.write(taken, compose.arguments_of(self.config.hydra), configs, {one.name: one.text for one in new})
        numbers = _submitted(new, taken)
        for one, number in zip(new, numbers, strict=True):
            one.state = f"job {number}"
            earlier[one.run.config.run_dir] = {
                "job": number,
                "run_dir": one.run.config.run_dir,
                "log": _log(one.run, str(number)),
                "overrides": one.run.overrides,
            }
        try:
            with report_disk_full(folder), atomic_file(folder / RECORD, "w") as handle:
                json.dump(list(earlier.values()), handle, indent=1)
        except BaseException:  # the jobs would be unknown to the next command
            sbatch.cancel(numbers)
            raise
        common = set.intersection(*(set(run.overrides) for run in runs))
        for one in submissions:
            print(f"{one.state}: {one.run.config.run_dir}  {' '.join(o for o in one.run.overrides if o not in common)}".rstrip())
        return []

    def _check_submission(self, runs: list[SweepRun], earlier: dict[str, dict[str, Any]], folder: Path) -> None:
        """Refuse invalid cluster options, several launchers, batches of runs, a folder with other runs, and too little GPU memory."""
        violations = {str(v): v for run in runs for v in job.violations(_options(run), run.config.stage.name, Path.cwd())}
        violations |= {str(v): v for run in runs for v in moldable.violations(run.config, self._words(run.overrides))}
        if not any(run.config.dry_run.enabled for run in runs):
            violations |= {str(v): v for v in sbatch.absent()}

        def refuse(key: str, value: object, rule: str, fix: str) -> None:
            violations[key] = Violation(key, value, rule, fix)

        if ranks.detect().world_size > 1:
            refuse(
                "hydra/launcher",
                "slurm",
                "would submit the sweep once per rank",
                "start a single process, without srun, torchrun or mpirun",
            )
        batch = self.config.hydra.sweeper.get("max_batch_size")
        if batch is not None:
            refuse("hydra.sweeper.max_batch_size", batch, "would submit the first runs before the others are validated", "leave it unset")
        for run in runs:
            before = earlier.get(run.config.run_dir)
            if before is not None and _meaning(before["overrides"]) != _meaning(run.overrides):
                rule = (
                    f"contains another sweep ({RECORD}): {Path(run.config.run_dir).name} was submitted with {' '.join(before['overrides'])}"
                )
                fix = "choose another run_dir, or append new values at the end of a list"
                refuse("run_dir", folder, rule, fix)
        for run in runs:
            violations |= {str(v): v for v in job_memory.violations(run.config, self._words(run.overrides))}
        if violations:
            raise UserError(list(violations.values()))
        for text in {text for run in runs if (text := moldable.idle_text(run.config))}:
            log.warning("%s", text)


def register() -> None:
    """Register the launchers with Hydra: `slurm`, and `basic`, which replaces the default launcher.

    Hydra imports plugins only from the package hydra_plugins. This module is registered under a second name in that package, so that
    no top-level folder hydra_plugins/ is required.
    """
    plugins, store = Plugins.instance(), ConfigStore.instance()
    sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))  # exists if another plugin is installed
    sys.modules[PLUGIN] = sys.modules[__name__]
    for name, launcher in {"basic": LocalLauncher, "slurm": SlurmLauncher}.items():
        launcher.__module__ = PLUGIN
        plugins.register(launcher)
        store.store(group="hydra/launcher", name=name, node={"_target_": f"{PLUGIN}.{launcher.__name__}"}, provider="pipeline")


def _points(runs: Sequence[SweepRun]) -> list[Point]:
    """The runs as points of the table, with the overrides that not all of them have."""
    common = set.intersection(*(set(run.overrides) for run in runs)) if len(runs) > 1 else set()
    points = []
    for run in runs:
        steps = run.config.training.steps if run.config.stage.name in TRAINING_STAGES else None
        points.append(Point(Path(run.config.run_dir), tuple(override for override in run.overrides if override not in common), steps))
    return points


def _without_hydra(composed: DictConfig) -> DictConfig:
    """Return the configuration without the node hydra."""
    task = copy.deepcopy(composed)
    with open_dict(task):
        del task["hydra"]
    return task


def _log(run: SweepRun, job_id: str) -> str:
    """Return the path of the job output. With job_id="%j" it is a pattern for sbatch, in which % is escaped as %%."""
    folder = str(Path.cwd() / run.config.run_dir)
    return f"{folder.replace('%', '%%') if job_id == '%j' else folder}/slurm-{job_id}.out"


def _read_record(record: Path) -> dict[str, dict[str, Any]]:
    """The runs that were submitted earlier: run_dir -> entry."""
    return {entry["run_dir"]: entry for entry in json.loads(record.read_text(encoding="utf-8"))} if record.is_file() else {}


def _meaning(overrides: Sequence[str]) -> list[str]:
    """The overrides that determine a run, without the options of its job."""
    return [override for override in overrides if not re.match(r"\+*(cluster[.=]|dry_run[.=])", override)]


def _state(run_dir: str, steps: int, before: dict[str, Any] | None, queue: set[int]) -> str:
    """The state of a run: finished, queued, or empty if it is to be submitted."""
    manifest = Path(run_dir) / MANIFEST
    if before and before["job"] in queue:
        return f"queued as job {before['job']}"
    if not manifest.is_file():
        return ""
    step = json.loads(manifest.read_text(encoding="utf-8"))["totals"].get("step", 0)
    return "finished" if step >= steps else ""


def _options(run: SweepRun) -> ClusterConfig:
    """The sbatch options of the job of a run."""
    return job_size.options(run.config, run.overrides)


def _submitted(new: Sequence[Submission], taken: Path) -> list[int]:
    """Submit the jobs, and return their ids; without jobs, there is no snapshot."""
    try:
        return sbatch.submit_all([lambda _, text=one.text: text for one in new])  # type: ignore[misc]
    except BaseException:
        shutil.rmtree(taken, ignore_errors=True)
        raise


def _job(run: SweepRun, number: int, conf: Path, taken: Path) -> job.Job:
    """Create the Slurm job of a run. The stage is set by the script; run_dir is the last override."""
    overrides = [o for o in run.overrides if not re.match(r"\+*(stage=|run_dir=|dry_run[.=])", o)]
    scripts = batch_scripts(Path.cwd())
    return job.Job(
        name=f"{run.config.stage.name}-{number}",
        stage=run.config.stage.name,
        overrides=(*overrides, f"run_dir={quoted(run.config.run_dir)}"),
        directory=Path.cwd(),
        output=_log(run, "%j"),
        conf=conf,
        scripts=scripts,
        python=job.python_of(Path.cwd(), scripts),
        snapshot=taken,
    )
