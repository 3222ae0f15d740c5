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

import xxhash
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from pipeline.common import ranks
from pipeline.common.artifact import MANIFEST
from pipeline.common.atomic_files import atomic_file, atomic_folder
from pipeline.common.errors import UserError, Violation
from pipeline.config import compose, layout
from pipeline.config.command_line import quoted
from pipeline.config.paths import CONF_DIR, batch_scripts
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch import job, local_sweep, sweep_table
from pipeline.launch.sweep_table import Point

#: Record of the submitted jobs in the sweep folder, one entry per run.
RECORD = "sweep.json"
log = logging.getLogger("pipeline")

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


class ValidatingLauncher(Launcher):
    """Base class of the launchers: composes and validates the runs of a sweep."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the Hydra context. Called by Hydra before launch()."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def world_size(self, config: RunConfig) -> int:
        """Return the number of ranks of a run."""
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
                check.check(config, self.world_size(config))
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

    def world_size(self, config: RunConfig) -> int:
        """Return the number of ranks of this job, or the simulated ranks of a dry run."""
        return layout.job_size(config, ranks.detect().world_size)

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

    def world_size(self, config: RunConfig) -> int:
        """Return the number of ranks of the job of a run."""
        return config.cluster.nodes * config.cluster.tasks_per_node

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit the runs, print the job ids and return. Called by Hydra with the overrides of each run."""
        runs = self.runs(job_overrides, initial_job_idx)
        folder = Path(self.config.hydra.sweep.dir)
        earlier = _read_record(folder / RECORD)
        self._check_submission(runs, earlier, folder)
        sources = [*reversed(compose.own_folders(self.config.hydra)), CONF_DIR]
        conf = _conf_folder(folder, sources)
        submissions = [
            Submission(run, job.render(_job(run, number, conf), run.config.cluster))
            for number, run in enumerate(runs, start=initial_job_idx)
        ]
        if any(run.config.dry_run.enabled for run in runs):
            print("\n".join(one.text for one in submissions), end="")
            return []
        queue = job.queued() if earlier else set()
        for one in submissions:
            one.state = _state(one.run.config.run_dir, one.run.config.training.steps, earlier.get(one.run.config.run_dir), queue)
        new = [one for one in submissions if not one.state]
        for one in new:
            Path(one.run.config.run_dir).mkdir(parents=True, exist_ok=True)  # Slurm opens the log file in it when the job starts
        if new and not conf.is_dir():
            _copy_conf(conf, sources)
        for one, number in zip(new, _submit_all([one.text for one in new]), strict=True):
            one.state = f"job {number}"
            earlier[one.run.config.run_dir] = {
                "job": number,
                "run_dir": one.run.config.run_dir,
                "log": _log(one.run, str(number)),
                "overrides": one.run.overrides,
            }
        with atomic_file(folder / RECORD, "w") as handle:
            json.dump(list(earlier.values()), handle, indent=1)
        common = set.intersection(*(set(run.overrides) for run in runs))
        for one in submissions:
            print(f"{one.state}: {one.run.config.run_dir}  {' '.join(o for o in one.run.overrides if o not in common)}".rstrip())
        return []

    def _check_submission(self, runs: list[SweepRun], earlier: dict[str, dict[str, Any]], folder: Path) -> None:
        """Refuse invalid cluster options, several launchers, batches of runs, a folder with other runs, and too little GPU memory."""
        violations = {str(v): v for run in runs for v in job.violations(run.config.cluster, run.config.stage.name, Path.cwd())}

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
            checked = run.config.stage.name in TRAINING_STAGES and run.config.cluster.hardware and run.config.cluster.check_memory
            if checked and (too_large := _memory_violation(run.config, self.world_size(run.config))):
                violations[str(too_large)] = too_large
        if violations:
            raise UserError(list(violations.values()))


def _memory_violation(config: RunConfig, size: int) -> Violation | None:
    """Return why a job would not fit in the memory of its GPUs; None if it fits, or fine-tunes weights that do not exist yet."""
    from pipeline.planner import memory_check  # loads torch
    from pipeline.training import finetuning

    if config.stage.name == "finetune":
        try:
            config = finetuning.complete(config, size)
        except UserError as error:  # an earlier job of a chain may write the checkpoint; the job itself refuses everything else
            log.warning("%s: whether it fits in memory is not checked: %s", config.run_dir, error.violations[0])
            return None
    return memory_check.violation(config, size, memory_check.planned(config, size))


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


def _conf_folder(folder: Path, sources: Sequence[Path]) -> Path:
    """The folder for a copy of conf/ and of a user's own files in the folder of a sweep, named after its content."""
    content = xxhash.xxh3_64()
    for source in sources:
        for path in sorted(source.rglob("*.yaml")):
            content.update(f"{path.relative_to(source)}\n".encode() + path.read_bytes())
    return (folder / f".conf-{content.hexdigest()}").absolute()


def _copy_conf(conf: Path, sources: Sequence[Path]) -> None:
    """Copy the configuration files. Those of conf/, the last source, replace a user's own of the same name, as in Hydra's search path."""
    with atomic_folder(conf) as copy_of_conf:
        for source in sources:
            shutil.copytree(source, copy_of_conf, dirs_exist_ok=True, ignore=None if source == CONF_DIR else _only_yaml)


def _only_yaml(folder: str, names: list[str]) -> list[str]:
    """The files of a folder that are no configuration; a user's own folder may have many others."""
    return [name for name in names if not name.endswith(".yaml") and not (Path(folder) / name).is_dir()]


def _job(run: SweepRun, number: int, conf: Path) -> job.Job:
    """Create the Slurm job of a run. The stage is set by the script; run_dir is the last override."""
    overrides = [o for o in run.overrides if not re.match(r"\+*(stage=|run_dir=|dry_run[.=])", o)]
    return job.Job(
        name=f"{run.config.stage.name}-{number}",
        stage=run.config.stage.name,
        overrides=(*overrides, f"run_dir={quoted(run.config.run_dir)}"),
        directory=Path.cwd(),
        output=_log(run, "%j"),
        conf=conf,
        scripts=batch_scripts(Path.cwd()),
    )


def _submit_all(texts: list[str]) -> list[int]:
    """Submit the jobs in order and return their ids. If one is rejected, cancel the jobs submitted before it."""
    job_ids: list[int] = []
    try:
        for text in texts:
            job_ids.append(job.submit(text))
    except UserError as error:
        if job_ids and not job.cancel(job_ids):
            submitted = " ".join(map(str, job_ids))
            rule = "were submitted before the error and could not be canceled"
            raise UserError([*error.violations, Violation("jobs", submitted, rule, f"run scancel {submitted}")]) from error
        raise
    return job_ids
