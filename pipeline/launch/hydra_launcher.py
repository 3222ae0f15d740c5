"""Hydra launchers for sweeps (`python -m pipeline -m`). All runs are validated before the first one starts.

The runs are executed sequentially in this process, or with `hydra/launcher=slurm` submitted as one Slurm job each. In that case
the process exits after the submission; no process monitors the jobs.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from pipeline.config import compose, layout
from pipeline.config.schema import RunConfig
from pipeline.errors import UserError, Violation
from pipeline.files import atomic_file
from pipeline.launch import job, preflight, ranks

#: Record of the submitted jobs in the sweep folder, one entry per run.
RECORD = "sweep.json"
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
                preflight.check(config, self.world_size(config))
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
    """Executes the runs sequentially in this process, on all its ranks."""

    def world_size(self, config: RunConfig) -> int:
        """Return the number of ranks of this job, or the simulated ranks of a dry run."""
        return layout.job_size(config, ranks.detect().world_size)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Execute the runs. Called by Hydra with the overrides of each run."""
        return [
            run_job(
                hydra_context=self.hydra_context,
                task_function=self.task_function,
                config=run.composed,
                job_dir_key="run_dir",
                job_subdir_key=None,
            )
            for run in self.runs(job_overrides, initial_job_idx)
        ]


class SlurmLauncher(ValidatingLauncher):
    """Submits each run as a Slurm job. If one submission fails, the jobs submitted before it are canceled."""

    def world_size(self, config: RunConfig) -> int:
        """Return the number of ranks of the job of a run."""
        return config.cluster.nodes * config.cluster.tasks_per_node

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit the runs, print the job ids and return. Called by Hydra with the overrides of each run."""
        runs = self.runs(job_overrides, initial_job_idx)
        texts = [job.render(_job(run, initial_job_idx + i), run.config.cluster) for i, run in enumerate(runs)]
        record = Path(self.config.hydra.sweep.dir) / RECORD
        self._check_submission(runs, record)
        if any(run.config.dry_run.enabled for run in runs):
            print("\n".join(texts), end="")
            return []
        for run in runs:
            Path(run.config.run_dir).mkdir(parents=True, exist_ok=True)  # Slurm opens the log file in it when the job starts
        job_ids = _submit_all(texts)
        entries = [
            {"job": job_id, "run_dir": run.config.run_dir, "log": _log(run, str(job_id)), "overrides": run.overrides}
            for job_id, run in zip(job_ids, runs, strict=True)
        ]
        with atomic_file(record, "w") as handle:
            json.dump(entries, handle, indent=1)
        common = set.intersection(*(set(run.overrides) for run in runs))
        for job_id, run in zip(job_ids, runs, strict=True):
            print(f"job {job_id}: {run.config.run_dir}  {' '.join(o for o in run.overrides if o not in common)}".rstrip())
        return []

    def _check_submission(self, runs: list[SweepRun], record: Path) -> None:
        """Refuse invalid cluster options, several launcher processes, batches of runs, and a folder with another sweep."""
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
        if record.is_file():
            earlier = [tuple(entry["overrides"]) for entry in json.loads(record.read_text(encoding="utf-8"))]
            if earlier != [run.overrides for run in runs]:
                refuse("run_dir", record.parent, f"contains another sweep ({record.name})", "choose another run_dir, or remove the folder")
        if violations:
            raise UserError(list(violations.values()))


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


def _job(run: SweepRun, number: int) -> job.Job:
    """Create the Slurm job of a run. The stage is set by the script; run_dir is the last override."""
    overrides = [o for o in run.overrides if not o.startswith(("stage=", "run_dir="))]
    return job.Job(
        name=f"{run.config.stage.name}-{number}",
        stage=run.config.stage.name,
        overrides=(*overrides, f"run_dir={quote(run.config.run_dir)}"),
        directory=Path.cwd(),
        output=_log(run, "%j"),
    )


def quote(text: str) -> str:
    """Quote a value for Hydra's override grammar."""
    if re.fullmatch(r"[\w/.@:+-]+", text, re.ASCII):
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", "\\'"), text)
    return f"'{escaped}'"


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
