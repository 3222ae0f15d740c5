"""Evaluation of the checkpoints of a training run by Slurm jobs that the run submits (evaluation.every).

The run does not wait, neither for the jobs nor for sbatch, and its GPUs train on. A job evaluates all checkpoints that wait for it, so that
one job at a time suffices, and a checkpoint whose job failed is evaluated by the next one. A checkpoint that waits is kept.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from pipeline.checkpoint import native
from pipeline.common.errors import UserError, Violation
from pipeline.config import command_line, compose
from pipeline.config.cluster import ClusterConfig
from pipeline.config.command_line import quoted
from pipeline.config.rules import check
from pipeline.config.rules.evaluation import reads_average
from pipeline.config.schema import EvaluationConfig, RunConfig
from pipeline.config.stages import Evaluate
from pipeline.evaluation import record
from pipeline.launch import job, submission
from pipeline.models.config import ModelConfig
from pipeline.training.checkpoint_hooks import CheckpointHooks

log = logging.getLogger("pipeline")

#: Seconds in which sbatch must answer; nothing waits for it.
_TIMEOUT = 600


def checkpoint_hooks(config: RunConfig, overrides: Sequence[str]) -> CheckpointHooks:
    """Return what the evaluation jobs of a run want of its checkpoints; arguments and errors as those of Schedule."""
    if not config.evaluation.every:
        return CheckpointHooks()
    schedule = Schedule(config, overrides)
    submissions = Submissions(schedule.submit)
    return CheckpointHooks(writes=schedule.is_due, keeps=schedule.waits, written=submissions.request, finished=submissions.wait)


class Submissions:
    """Submits in a thread, since Slurm may take minutes to answer while all ranks would wait.

    Args:
        submit: everything that is due; requests during a call are answered by one further call.
    """

    def __init__(self, submit: Callable[[], None]) -> None:
        self._submit, self._thread = submit, ThreadPoolExecutor(1, "evaluation-jobs")
        self._calls: list[Future[None]] = []

    def request(self) -> None:
        """Submit what is due, soon."""
        self._calls = [call for call in self._calls if not call.done()]
        if len(self._calls) < 2:  # one runs, and one follows
            self._calls.append(self._thread.submit(self._submit))

    def wait(self, seconds: float = submission.TIMEOUT) -> None:
        """Wait for the calls, at most for some seconds: the nodes of the job have nothing to do meanwhile."""
        if futures.wait(self._calls, seconds).not_done:
            log.warning("Slurm does not answer: the evaluation of the last checkpoint may not be submitted; stage=evaluate evaluates it")
        for call in self._calls:
            if call.done():
                call.result()


class Schedule:
    """The evaluation jobs of a run.

    Args:
        overrides: its command line, without Hydra's own arguments.
        environment: variables of the job of the run.

    Raises:
        UserError: Slurm is not there, or the jobs would be refused.
    """

    def __init__(self, config: RunConfig, overrides: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
        self._every, self._steps, self._run_dir = config.evaluation.every, config.training.steps, Path(config.run_dir)
        self._cluster = _cluster(config.evaluation, config.cluster, environment)
        self._weights = native.EMA if reads_average(config.evaluation) else None
        self._environment = job.outside(environment)
        kinds = {"validation": config.evaluation.validation, "tasks": bool(config.evaluation.tasks)}  # as record.path_of names them
        self._jobs = {
            kind: _job(config.evaluation, config.run_dir, kind, overrides, environment) for kind, wanted in kinds.items() if wanted
        }
        if shutil.which("sbatch", path=environment.get("PATH")) is None:
            fix = "set it to 0, and evaluate the checkpoints after the run: stage=evaluate stage.checkpoint=all"
            raise UserError.of("evaluation.every", self._every, "submits Slurm jobs, and this machine has no command sbatch", fix)
        violations = job.violations(self._cluster, "evaluate", Path.cwd())
        for planned in self._jobs.values():
            violations += _violations(planned, config.model, self._cluster.nodes * self._cluster.tasks_per_node)
        UserError.raise_for(violations)

    def is_due(self, step: int) -> bool:
        """Whether the run writes and submits the checkpoint of a step; that of step 0 is an imported model."""
        return step > 0 and record.is_due(step, self._every, self._steps)

    def waits(self, checkpoint: Path) -> bool:
        """Whether a checkpoint waits for an evaluation."""
        step = native.step_of(checkpoint)
        return any(self._lacks(step, kind) for kind in self._jobs)

    def _lacks(self, step: int, kind: str) -> bool:
        """Whether the checkpoint of a step waits for one kind of evaluation."""
        return self.is_due(step) and not record.path_of(self._run_dir, step, kind, self._weights).is_file()

    def submit(self) -> None:
        """Submit the jobs that the checkpoints need, unless one that has not started waits in the queue.

        An error of Slurm or of the disk is logged and does not end the run: the next submission covers the same checkpoints.
        """
        for kind, planned in self._jobs.items():
            steps = [step for path in native.complete(self._run_dir) if self._lacks(step := native.step_of(path), kind)]
            if not steps:
                continue
            shown = f"{'steps' if len(steps) > 1 else 'step'} {', '.join(map(str, steps))}"
            try:
                (self._run_dir / record.FOLDER).mkdir(exist_ok=True)  # Slurm opens the log in it
                if submission.is_pending(planned.name, self._environment):
                    log.info("evaluation of %s: a %s job is in the queue", shown, kind)
                    continue
                log.info(
                    "evaluation of %s: job %d (%s)",
                    shown,
                    submission.submit(job.render(planned, self._cluster), self._environment, _TIMEOUT),
                    kind,
                )
            except (UserError, OSError) as error:
                reason = error.violations[0] if isinstance(error, UserError) else error
                log.warning("evaluation of %s was not submitted, and the checkpoints are kept: %s", shown, reason)


def _cluster(wanted: EvaluationConfig, cluster: ClusterConfig, environment: Mapping[str, str]) -> ClusterConfig:
    """The sbatch options of the jobs: those of the cluster, in the account and partition of this job where the cluster names none.

    Where the cluster has queues, the partition is that of the first one that fits.
    """
    return dataclasses.replace(
        cluster,
        nodes=wanted.nodes,
        tasks_per_node=wanted.tasks_per_node,
        time=wanted.time,
        account=cluster.account or environment.get("SLURM_JOB_ACCOUNT"),
        partition=cluster.partition or (None if cluster.queues else environment.get("SLURM_JOB_PARTITION")),
        qos=cluster.qos or (None if cluster.queues else environment.get("SLURM_JOB_QOS")),
        sbatch=[*cluster.sbatch, "--dependency=singleton", *wanted.sbatch],
    )


def _job(wanted: EvaluationConfig, run_dir: str, kind: str, overrides: Sequence[str], environment: Mapping[str, str]) -> job.Job:
    """The job of one kind. Its name belongs to this run and kind: of the jobs with the same name, Slurm runs one at a time."""
    folder = Path(run_dir).absolute() / record.FOLDER
    left_out = r"\+*((stage|run_dir|training\.context_factor)=|(stage|dry_run|evaluation|checkpoint)[.=])"
    kept = [o for o in overrides if not re.match(left_out, o)]
    settings = ["stage.checkpoint=all", f"stage.every={wanted.every}"]
    if kind == "tasks":
        settings.append(f"stage.tasks=[{','.join(map(quoted, wanted.tasks))}]")
        given = {"task_folder": wanted.task_folder, "few_shot": wanted.few_shot, "limit": wanted.limit}
        settings += [f"stage.{key}={quoted(str(value))}" for key, value in given.items() if value is not None]
    conf = environment.get("PIPELINE_CONF")
    return job.here(
        name=f"evaluate-{kind}-{xxhash.xxh3_64_hexdigest(str(folder.parent).encode())}",
        stage="evaluate",
        overrides=(*kept, *wanted.overrides, *settings, f"run_dir={quoted(run_dir)}"),
        output=job.log_file(folder, f"slurm-{kind}"),
        conf=Path(conf) if conf else None,
    )


def _violations(planned: job.Job, model: ModelConfig, world_size: int) -> list[Violation]:
    """Why a job would be refused that evaluates checkpoints of this model."""
    try:
        violations, composed = compose.diagnose(command_line.parse(["stage=evaluate", *planned.overrides]))
        if not violations:
            config = compose.to_run_config(composed)
            violations = check.violations(config, world_size)
            if isinstance(config.stage, Evaluate) and not (violations or config.stage.tasks):
                violations = check.evaluation_violations(dataclasses.replace(config, model=model), world_size)
    except UserError as error:
        violations = list(error.violations)
    where = "(in the jobs of evaluation.every; evaluation.overrides sets it)"
    return [dataclasses.replace(violation, rule=f"{violation.rule} {where}") for violation in violations]
