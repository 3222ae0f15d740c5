"""Sweeps, `python -m pipeline -m`: every point is checked before any starts, and each has a run directory of its own.

The points then run one after the other in this process, or with `hydra/launcher=slurm` become Slurm jobs, one each, and
this process ends: nothing of ours has to stay alive while they run.
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

#: What was submitted: one entry a point. Lies in the sweep's folder.
RECORD = "sweep.json"
#: The name of this module among Hydra's plugins.
PLUGIN = "hydra_plugins.tannschen"


@dataclass(frozen=True)
class Point:
    """One point of a sweep.

    Attributes:
        overrides: its command line, without Hydra's own settings.
        composed: its configuration as Hydra composed it, run_dir being the point's own.
        config: the same, typed.
    """

    overrides: tuple[str, ...]
    composed: DictConfig
    config: RunConfig


class CheckedLauncher(Launcher):
    """What both launchers share: composing and checking the points."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before the launch."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def world_size(self, config: RunConfig) -> int:
        """Ranks of a point's run."""
        raise NotImplementedError

    def points(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[Point]:
        """The sweep's points, all of them legal.

        Raises:
            UserError: with the violations of all points, each told once.
        """
        setup_globals()
        found: list[Point] = []
        violations: dict[str, Violation] = {}
        for number, overrides in enumerate(job_overrides, start=first):
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(composed):
                composed.hydra.job.id = composed.hydra.job.num = number
                composed.run_dir = str(Path(composed.hydra.sweep.dir) / str(composed.hydra.sweep.subdir))
            try:
                config = compose.to_run_config(_without_hydra(composed))
                preflight.check(config, self.world_size(config))
                found.append(Point(tuple(filter_overrides(overrides)), composed, config))
            except UserError as error:
                violations |= {str(v): v for v in error.violations}
        if len({point.config.run_dir for point in found}) < len(found):
            fix = "make hydra.sweep.subdir differ between them, for example ${hydra.job.num}"
            violations["run_dir"] = Violation("run_dir", found[0].config.run_dir, "is shared by several points of the sweep", fix)
        if violations:
            raise UserError(list(violations.values()))
        return found


class LocalLauncher(CheckedLauncher):
    """The points one after the other, in this process and its ranks."""

    def world_size(self, config: RunConfig) -> int:
        """Ranks of this job, or those that a dry run imagines."""
        return layout.job_size(config, ranks.detect().world_size)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Called by Hydra with the command line of each point."""
        return [
            run_job(
                hydra_context=self.hydra_context,
                task_function=self.task_function,
                config=point.composed,
                job_dir_key="run_dir",
                job_subdir_key=None,
            )
            for point in self.points(job_overrides, initial_job_idx)
        ]


class SlurmLauncher(CheckedLauncher):
    """The points as Slurm jobs. A sweep is submitted whole or not at all."""

    def world_size(self, config: RunConfig) -> int:
        """Ranks of a point's job."""
        return config.cluster.nodes * config.cluster.tasks_per_node

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Called by Hydra with the command line of each point; prints the jobs' numbers and returns at once."""
        points = self.points(job_overrides, initial_job_idx)
        texts = [job.render(_job(p, initial_job_idx + i), p.config.cluster) for i, p in enumerate(points)]
        record = Path(self.config.hydra.sweep.dir) / RECORD
        self._refuse_what_cannot_be_submitted(points, record)
        if any(point.config.dry_run.enabled for point in points):
            print("\n".join(texts), end="")
            return []
        for point in points:
            Path(point.config.run_dir).mkdir(parents=True, exist_ok=True)  # Slurm opens the log before the run begins
        numbers = _submit_all(texts)
        entries = [
            {"job": number, "run_dir": p.config.run_dir, "log": _log(p, str(number)), "overrides": p.overrides}
            for number, p in zip(numbers, points, strict=True)
        ]
        with atomic_file(record, "w") as handle:
            json.dump(entries, handle, indent=1)
        common = set.intersection(*(set(p.overrides) for p in points))
        for number, p in zip(numbers, points, strict=True):
            print(f"job {number}: {p.config.run_dir}  {' '.join(o for o in p.overrides if o not in common)}".rstrip())
        return []

    def _refuse_what_cannot_be_submitted(self, points: list[Point], record: Path) -> None:
        """A site's settings, a launch from many ranks or in pieces, or a folder that holds another sweep."""
        violations = {str(v): v for p in points for v in job.violations(p.config.cluster, p.config.stage.name, Path.cwd())}

        def refuse(key: str, value: object, rule: str, fix: str) -> None:
            violations[key] = Violation(key, value, rule, fix)

        if ranks.detect().world_size > 1:
            refuse(
                "hydra/launcher", "slurm", "every rank would submit the sweep", "start it as one process, without srun, torchrun or mpirun"
            )
        batch = self.config.hydra.sweeper.get("max_batch_size")
        if batch is not None:
            refuse("hydra.sweeper.max_batch_size", batch, "would check only so many points before it submits them", "leave it unset")
        if record.is_file():
            earlier = [tuple(entry["overrides"]) for entry in json.loads(record.read_text(encoding="utf-8"))]
            if earlier != [p.overrides for p in points]:
                refuse("run_dir", record.parent, f"holds another sweep ({record.name})", "choose another run_dir, or remove the folder")
        if violations:
            raise UserError(list(violations.values()))


def register() -> None:
    """Make the launchers known to Hydra: `slurm`, and `basic`, its default, with the check in front.

    Hydra takes plugins from the package hydra_plugins alone. Ours stand here, among the rest of launch/, and this module gets
    a second name there, which spares a folder beside pipeline/.
    """
    plugins, store = Plugins.instance(), ConfigStore.instance()
    sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))  # there already when another plugin is installed
    sys.modules[PLUGIN] = sys.modules[__name__]
    for name, launcher in {"basic": LocalLauncher, "slurm": SlurmLauncher}.items():
        launcher.__module__ = PLUGIN
        plugins.register(launcher)
        store.store(group="hydra/launcher", name=name, node={"_target_": f"{PLUGIN}.{launcher.__name__}"}, provider="pipeline")


def _without_hydra(composed: DictConfig) -> DictConfig:
    """The run's configuration alone."""
    task = copy.deepcopy(composed)
    with open_dict(task):
        del task["hydra"]
    return task


def _log(point: Point, number: str) -> str:
    """The file of a job's output; sbatch puts the job's number for %j, and % for %%."""
    folder = str(Path.cwd() / point.config.run_dir)
    return f"{folder.replace('%', '%%') if number == '%j' else folder}/slurm-{number}.out"


def _job(point: Point, number: int) -> job.Job:
    """The job of a point. Its script names the stage; its run directory is given last."""
    overrides = [o for o in point.overrides if not o.startswith(("stage=", "run_dir="))]
    return job.Job(
        name=f"{point.config.stage.name}-{number}",
        stage=point.config.stage.name,
        overrides=(*overrides, f"run_dir={quoted(point.config.run_dir)}"),
        directory=Path.cwd(),
        output=_log(point, "%j"),
    )


def quoted(text: str) -> str:
    """A text as Hydra reads it back from a command line."""
    if re.fullmatch(r"[\w/.@:+-]+", text, re.ASCII):
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", "\\'"), text)
    return f"'{escaped}'"


def _submit_all(texts: list[str]) -> list[int]:
    """Submit the jobs in order; when one is refused, those before it are taken back."""
    numbers: list[int] = []
    try:
        for text in texts:
            numbers.append(job.submit(text))
    except UserError as error:
        if numbers and not job.cancel(numbers):
            known = " ".join(map(str, numbers))
            left = Violation("jobs", known, "were submitted before that and could not be taken back", f"scancel {known}")
            raise UserError([*error.violations, left]) from error
        raise
    return numbers
