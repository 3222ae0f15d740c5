"""Hydra launchers for sweeps (`python -m pipeline -m`). All runs are validated before the first one starts.

The runs are executed sequentially in this process, or with `hydra/launcher=slurm` submitted as one Slurm job each. In that case
the process exits after the submission, and no process monitors the jobs; with hydra.launcher.wait=true it stays until they have ended, as
hydra/sweeper=optuna needs it.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from pipeline.common import ranks
from pipeline.common.atomic_files import make_folder
from pipeline.common.errors import STOPPED, UserError, Violation
from pipeline.common.metrics_file import FILE as METRICS
from pipeline.config import compose, layout
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.launch import hydra_sweeper, moldable, sweep_manifest, sweep_submission, sweep_table
from pipeline.launch.hydra_sweeper import check_fork, points_of, without_hydra
from pipeline.launch.sweep_manifest import SweepEntry, SweepManifest
from pipeline.launch.sweep_submission import SweepRun
from pipeline.launch.sweep_table import Point

log = logging.getLogger("pipeline")

#: Module name under which Hydra imports the plugins.
PLUGIN = "hydra_plugins.tannschen"


class ValidatingLauncher(Launcher):
    """Base class of the launchers: composes and validates the runs of a sweep."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store the Hydra context. Called by Hydra before launch()."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config
        self._multirun = hydra_sweeper.MultirunFile(self.folder)
        if not hydra_sweeper.searches(config):
            loader = hydra_context.config_loader
            loader.load_sweep_config = hydra_sweeper.compose_once(loader.load_sweep_config, self._multirun)
        self._done: dict[str, tuple[SweepRun, str]] = {}  # run_dir -> a run and its state, also of earlier batches of a sweeper

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:  # noqa: ARG002 -- numbers are those of the manifest
        """Start the runs. Called by Hydra with the overrides of each run."""
        with self._multirun.removed_unless_started():
            return self.start(job_overrides)

    def start(self, job_overrides: Sequence[Sequence[str]]) -> Sequence[JobReturn]:
        """Start the runs, and return the results of those that have ended."""
        raise NotImplementedError

    def sized(self, config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, int]:
        """Return the configuration of a run with its layout, and its number of ranks."""
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        """The folder of the sweep."""
        return Path(self.config.hydra.sweep.dir)

    def runs(self, job_overrides: Sequence[Sequence[str]]) -> tuple[list[SweepRun], SweepManifest]:
        """Compose and validate all runs of the sweep. Those that are in its manifest keep their numbers.

        Raises:
            UserError: contains the violations of all runs, without duplicates.
        """
        setup_globals()
        manifest = earlier = sweep_manifest.read(self.folder)
        runs: list[SweepRun] = []
        violations: list[Violation] = []
        if not job_overrides:
            lists = " ".join(word for word in self.config.hydra.overrides.task if re.search(r"[,(]", word))
            raise UserError.of("argument", lists, "gives no point: a list or range is empty", "name at least one value")
        count, job_overrides = len(job_overrides), list({tuple(filter_overrides(words)): words for words in job_overrides}.values())
        if len(job_overrides) < count and not hydra_sweeper.searches(self.config):  # a search may choose a point twice
            log.warning("%d points of the sweep have the settings of others: each point is one run", count - len(job_overrides))
        points = [tuple(filter_overrides(overrides)) for overrides in job_overrides]
        for overrides, words, (settings, options) in zip(job_overrides, points, sweep_manifest.split(points), strict=True):
            point = sweep_manifest.point_id(settings)
            number = manifest.number(point)
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(composed):
                composed.hydra.job.id = composed.hydra.job.num = number
                composed.run_dir = str(Path(composed.hydra.sweep.dir) / str(composed.hydra.sweep.subdir))
            entry = SweepEntry(point, number, composed.run_dir, settings, options)
            manifest = manifest.with_point(entry)
            if (other := earlier.other(entry.run_dir, point)) is not None:
                rule = f"is that of another point of this sweep ({sweep_manifest.NAME}): {' '.join(other.overrides)}"
                fix = "choose another run_dir, or leave hydra.sweep.subdir to its default"
                violations.append(Violation("run_dir", entry.run_dir, rule, fix))
            elif point not in earlier.entries and (Path(entry.run_dir) / METRICS).exists():
                rule = f"has a run that is not of this sweep: {sweep_manifest.NAME} does not list it"
                violations.append(Violation("run_dir", entry.run_dir, rule, "choose another run_dir for the sweep"))
            try:
                config = compose.to_run_config(without_hydra(composed))
                check.check(*self.sized(config, filter_overrides(overrides)))
                check_fork(config)
                runs.append(SweepRun(entry, config, words, composed))
            except UserError as error:
                violations += error.violations
        if len({run.config.run_dir for run in runs}) < len(runs):
            fix = "set hydra.sweep.subdir to a value that differs between runs, for example ${hydra.job.num}, and no value twice"
            violations.append(Violation("run_dir", runs[0].config.run_dir, "is shared by several runs of the sweep", fix))
        UserError.raise_for(violations)
        return runs, manifest

    def show_table(self, runs: Sequence[SweepRun], points: Sequence[Point], manifest: SweepManifest) -> None:
        """Write and print the table of all points: these runs, those of earlier batches, and those of earlier commands."""
        self._done |= {run.config.run_dir: (run, point.state) for run, point in zip(runs, points, strict=True)}
        done = points_of([run for run, _ in self._done.values()], manifest, [state for _, state in self._done.values()])
        known = {entry.id for entry in (run.entry for run, _ in self._done.values())}
        done += [sweep_table.row_of(point) for point in sweep_table.read_states(manifest) if point.entry.id not in known]
        print(f"{sweep_table.write(self.folder, done)}\nsee {self.folder / sweep_table.MARKDOWN}", flush=True)

    def results(self, runs: Sequence[SweepRun], points: Sequence[Point], job_overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
        """Return the results of runs that have ended, in the order of the overrides, of which some may be alike."""
        by_overrides = {run.words: point for run, point in zip(runs, points, strict=True)}
        per_byte = hydra_sweeper.per_byte(self.config)
        return [hydra_sweeper.result(by_overrides[tuple(filter_overrides(words))], words, per_byte=per_byte) for words in job_overrides]


class LocalLauncher(ValidatingLauncher):
    """Executes the runs sequentially in this process, on all its ranks, and prints a table of them."""

    def sized(self, config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, int]:
        """Return the number of ranks of this job, or the simulated ranks of a dry run."""
        config = moldable.simulated(config, overrides) if config.dry_run.enabled else config
        return config, layout.job_size(config, ranks.detect().world_size)

    def start(self, job_overrides: Sequence[Sequence[str]]) -> Sequence[JobReturn]:
        """Execute the runs.

        Raises:
            SystemExit: a run has failed or was asked to stop, with the exit code of the first one.
        """
        here = ranks.detect()
        UserError.raise_for(hydra_sweeper.search_violations(self.config, here.world_size))
        runs, manifest = self.runs(job_overrides)
        manifest = replace(manifest, config_dirs=tuple(map(str, compose.own_folders(self.config.hydra))))
        writes = here.rank == 0 and not any(run.config.dry_run.enabled for run in runs)

        def record(number: int, outcome: str) -> None:
            nonlocal manifest
            manifest = manifest.with_outcome(runs[number].entry.id, outcome)
            if writes:
                manifest.write()

        if writes:
            make_folder(self.folder)
            manifest.write()
            self._multirun.started = True
        points, code = hydra_sweeper.execute(points_of(runs, manifest), [partial(self._execute, run) for run in runs], here, record)
        if writes:
            self.show_table(runs, points, manifest)
        if hydra_sweeper.searches(self.config) and code not in STOPPED:
            return self.results(runs, points, job_overrides)
        if code:
            sys.exit(code)
        return []

    def _execute(self, run: SweepRun) -> JobReturn:
        """Execute a run. Hydra makes its run directory, which a dry run does not need."""
        folder = Path(run.config.run_dir)
        is_new = not folder.exists()
        result = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=run.composed,
            job_dir_key="run_dir",
            job_subdir_key=None,
        )
        if is_new and run.config.dry_run.enabled and not any(folder.iterdir()):
            folder.rmdir()
        return result


class SlurmLauncher(ValidatingLauncher):
    """Submits each run as a Slurm job. If one submission fails, the jobs submitted before it are canceled.

    Args:
        at_once: most jobs that run at a time; None for no limit.
        wait: wait for the end of the jobs and print a table. A sweeper that searches needs it.
    """

    def __init__(self, at_once: int | None = None, wait: bool = False) -> None:
        self._at_once, self._wait = at_once, wait

    def sized(self, config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, int]:
        """Return the layout and the number of ranks of the job of a run on as many nodes as it asks for."""
        words = [*compose.folder_options(compose.own_folders(self.config.hydra)), *overrides]
        return moldable.expected(config, words, overrides)

    def start(self, job_overrides: Sequence[Sequence[str]]) -> Sequence[JobReturn]:
        """Submit the runs, print the job ids and return."""
        runs, manifest = self.runs(job_overrides)
        folders = compose.own_folders(self.config.hydra)
        sweep_submission.refuse(runs, folders, self._at_once, self._violations())
        if any(run.config.dry_run.enabled for run in runs):
            sweep_submission.render(runs, manifest, folders, self._at_once)
            print("\n".join(run.text for run in runs), end="")
            return []
        arguments = compose.arguments_of(self.config.hydra)
        manifest = replace(manifest, config_dirs=tuple(map(str, folders)))
        manifest = sweep_submission.submit(runs, manifest, folders, arguments, self._at_once)
        self._multirun.started = True
        done = [replace(point, state="ended") if point.steps is None else point for point in points_of(runs, manifest)]
        for run, row in zip(runs, done, strict=True):
            print(f"{run.state}: {run.entry.run_dir}  {' '.join(row.values)}".rstrip(), flush=True)
        if not self._wait:
            return []
        hydra_sweeper.wait_for(runs, manifest)
        states = {point.entry.id: sweep_table.row_of(point).state for point in sweep_table.read_states(manifest)}
        done = [replace(row, state=row.state or states[run.entry.id]) for run, row in zip(runs, done, strict=True)]
        self.show_table(runs, done, manifest)
        results = self.results(runs, done, job_overrides)
        if hydra_sweeper.searches(self.config):
            return results
        if any(point.steps is not None and result.status is JobStatus.FAILED for point, result in zip(done, results, strict=True)):
            sys.exit(1)
        return []

    def _violations(self) -> Iterator[Violation]:
        """Yield why these launches cannot submit: several launchers, or batches of runs."""
        yield from hydra_sweeper.search_violations(self.config, 1)
        if hydra_sweeper.searches(self.config) and not self._wait:
            rule = "does not wait for the results, by which hydra/sweeper chooses the next points"
            yield Violation("hydra.launcher.wait", False, rule, "set it to true, and leave this process running, for example in tmux")
        if ranks.detect().world_size > 1:
            rule = "would submit the sweep once per rank"
            yield Violation("hydra/launcher", "slurm", rule, "start a single process, without srun, torchrun or mpirun")
        if (batch := self.config.hydra.sweeper.get("max_batch_size")) is not None:
            rule = "would submit the first runs before the others are validated"
            yield Violation("hydra.sweeper.max_batch_size", batch, rule, "leave it unset; hydra.launcher.at_once limits the jobs that run")


def register() -> None:
    """Register the launchers with Hydra: `slurm`, and `basic`, which replaces the default launcher.

    Hydra imports plugins only from the package hydra_plugins. This module is registered under a second name in that package, so that
    no top-level folder hydra_plugins/ is required.
    """
    plugins, store = Plugins.instance(), ConfigStore.instance()
    sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))  # exists if another plugin is installed
    sys.modules[PLUGIN] = sys.modules[__name__]
    for name, launcher, keys in (("basic", LocalLauncher, {}), ("slurm", SlurmLauncher, {"at_once": None, "wait": False})):
        launcher.__module__ = PLUGIN
        plugins.register(launcher)
        store.store(group="hydra/launcher", name=name, node={"_target_": f"{PLUGIN}.{launcher.__name__}", **keys}, provider="pipeline")
