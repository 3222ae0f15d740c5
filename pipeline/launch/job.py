"""Slurm jobs: rendering as a pure function, and submission.

slurm/STAGE.sbatch defines how a stage runs inside a job; conf/cluster/ defines the sbatch options of a cluster.
A rendered job consists of the options of the cluster and a call of the script of the stage.
"""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.errors import UserError, Violation
from pipeline.common.ranks import Ranks
from pipeline.config.paths import batch_scripts
from pipeline.config.schema import ClusterConfig
from pipeline.config.stages import GPU_STAGES, TRAINING_STAGES

log = logging.getLogger("pipeline")

#: Timeout of sbatch and scancel, seconds.
TIMEOUT = 60
#: Time before the limit at which Slurm signals a training job to write a checkpoint, as in slurm/pretrain.sbatch. Slurm may signal a
#: minute earlier.
SIGNAL_SECONDS = 180
#: Options that a cluster may require.
REQUIRABLE = ("account", "partition", "qos", "memory")


@dataclass(frozen=True)
class Job:
    """A batch job: a stage with its overrides.

    Attributes:
        name: job name.
        stage: name of the stage; the job runs slurm/STAGE.sbatch.
        overrides: arguments of `python -m pipeline`, without `stage=`.
        directory: the working directory of the job.
        output: file for standard output and error, %j being the job id; its folder must exist when the job starts.
        conf: the configuration files that the job reads; those of the package when None.
        scripts: folder of the batch scripts (paths.batch_scripts); slurm/ in `directory` when None.
    """

    name: str
    stage: str
    overrides: tuple[str, ...]
    directory: Path
    output: str
    conf: Path | None = None
    scripts: Path | None = None


def render(job: Job, cluster: ClusterConfig) -> str:
    """Render the batch script passed to sbatch."""
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {_directive(option)}" for option in _options(job, cluster)]
    variables = {"PIPELINE_CONF": str(job.conf)} if job.conf else {}
    script = f"{job.scripts or 'slurm'}/{job.stage}.sbatch"
    lines += [
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(value)}" for name, value in (variables | _variables(job.scripts)).items()),
        " \\\n  ".join(["exec bash " + shlex.quote(script), *map(shlex.quote, job.overrides)]),
    ]
    return "\n".join(lines) + "\n"


def _variables(scripts: Path | None) -> dict[str, str]:
    """The variables of batch scripts outside of the working directory: where they are, and the Python that has the package."""
    return {"PIPELINE_SLURM": str(scripts), "PIPELINE_PYTHON": sys.executable} if scripts else {}


def _options(job: Job, cluster: ClusterConfig) -> Iterator[str]:
    """Yield the sbatch options of a job."""
    yield f"--job-name={job.name}"
    yield f"--chdir={job.directory}"
    yield f"--output={job.output}"
    yield "--open-mode=append"  # a requeued job continues its log
    yield f"--nodes={cluster.nodes}"
    yield f"--ntasks-per-node={cluster.tasks_per_node}"
    if job.stage in TRAINING_STAGES:
        yield "--requeue"
        yield f"--signal=USR1@{SIGNAL_SECONDS}"
    yield from site_options(cluster, job.stage)


def site_options(cluster: ClusterConfig, stage: str) -> Iterator[str]:
    """Yield the sbatch options of a cluster that do not depend on the number of ranks. Only the stages that train or evaluate use GPUs."""
    for name in ("account", "partition", "qos"):
        if value := getattr(cluster, name):
            yield f"--{name}={value}"
    yield f"--cpus-per-task={cluster.cpus_per_task}"
    if cluster.gpus_per_node and stage in GPU_STAGES:
        yield f"--gpus-per-node={cluster.gpus_per_node}"
    if cluster.memory:
        yield f"--mem={cluster.memory}"
    yield f"--time={cluster.time}"
    yield from cluster.sbatch


def _directive(option: str) -> str:
    """Format an option for an #SBATCH line, quoted if it contains spaces, # or quotes."""
    if re.fullmatch(r"[\w@%+=:,./-]*|-\w [\w@%+=:,./-]+", option):  # --name=value, or -N value
        return option
    name, equals, value = option.partition("=")
    return name + equals + '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def sbatch_line(cluster: ClusterConfig, stage: str, world_size: int, overrides: Iterable[str], scripts: Path | None = None) -> str:
    """Return the sbatch command that starts a stage, to be run in the same working directory.

    Args:
        cluster: options of the cluster.
        stage: name of the stage.
        world_size: number of ranks.
        overrides: arguments of `python -m pipeline`; stage= and dry_run arguments are removed.
        scripts: folder of the batch scripts (paths.batch_scripts); slurm/ in the working directory when None.
    """
    nodes = -(-world_size // cluster.tasks_per_node)
    size = [f"--nodes={nodes}", f"--ntasks-per-node={cluster.tasks_per_node}"]
    if nodes * cluster.tasks_per_node != world_size:  # the last node has fewer ranks
        size.append(f"--ntasks={world_size}")
    kept = [o for o in overrides if not re.match(r"\+*(stage=|dry_run[.=])", o)]
    variables = ["env", *(f"{name}={value}" for name, value in _variables(scripts).items())] if scripts else []
    return shlex.join([*variables, "sbatch", *size, *site_options(cluster, stage), f"{scripts or 'slurm'}/{stage}.sbatch", *kept])


def violations(cluster: ClusterConfig, stage: str, directory: Path) -> list[Violation]:
    """Return the reasons why a job of this stage cannot be rendered or submitted."""
    found = []
    scripts = batch_scripts(directory) or directory / "slurm"
    if not (scripts / f"{stage}.sbatch").is_file():
        stages = ", ".join(sorted(p.stem for p in scripts.glob("*.sbatch")))
        found.append(Violation("stage", stage, f"has no {scripts}/{stage}.sbatch", f"choose one of {stages}, or create that file"))
    texts = {name: getattr(cluster, name) for name in ("account", "partition", "qos", "memory")}
    texts |= {f"sbatch[{i}]": option for i, option in enumerate(cluster.sbatch)}
    for name, text in texts.items():
        if text is not None and not text.isprintable():
            found.append(Violation(f"cluster.{name}", repr(text), "must be a single printable line", f"fix cluster.{name}"))
    found += [
        Violation("cluster.sbatch", option, "must be an sbatch option in command-line form", "write --name=value")
        for option in cluster.sbatch
        if not option.startswith("-")
    ]
    unknown = [key for key in cluster.required if key not in REQUIRABLE]
    found += [Violation("cluster.required", key, f"must be one of {', '.join(REQUIRABLE)}", "remove it") for key in unknown]
    # Slurm reads a plain number as minutes, and YAML parses an unquoted 24:00:00 as 86400, which would be two months.
    if not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2}|UNLIMITED", cluster.time):
        rule = "must have the form days-hours, hours:minutes:seconds or minutes:seconds"
        found.append(Violation("cluster.time", cluster.time, rule, 'use one of these forms, quoted in a YAML file: "24:00:00"'))
    return found


def missing(cluster: ClusterConfig) -> list[str]:
    """Return the keys that the cluster requires (cluster.required) and that are not set."""
    given = [option.lstrip("-").partition("=")[0] for option in cluster.sbatch]
    return [key for key in cluster.required if getattr(cluster, key, None) is None and key not in given]


def warn_of_other_size(cluster: ClusterConfig, stage: str, here: Ranks) -> None:
    """Warn on rank 0 if a job of srun has another size than its cluster=NAME: sbatch does not read conf/cluster/."""
    nodes, tasks = cluster.nodes, cluster.tasks_per_node
    trains = here.launcher == "srun" and here.rank == 0 and stage in GPU_STAGES
    if trains and cluster.name != "local" and here.world_size != nodes * tasks:
        size = f"cluster={cluster.name} has {nodes} nodes x {tasks} tasks"
        log.warning("this job has %d ranks, %s: sbatch does not read conf/cluster; dry_run=true prints its options", here.world_size, size)


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job without those of the job itself and of its launcher, for a job that it submits."""
    launcher = r"SLURM(?!_CONF$)|PMIX?_|MPI_|OMPI_|TORCHELASTIC_|GROUP_|ROLE_"
    rank = r"(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|PIPELINE_EXIT_CODE$|(CUDA|ROCR|HIP)_VISIBLE_DEVICES$"
    return {name: value for name, value in environment.items() if not re.match(f"{launcher}|{rank}", name)}


def submit(text: str, environment: Mapping[str, str] | None = None) -> int:
    """Submit a batch script and return the job id.

    Args:
        text: the script.
        environment: variables of sbatch, which the job inherits; default: those of this process.

    Raises:
        UserError: sbatch is not installed, timed out, or rejected the job; the message contains the output of sbatch.
    """
    command = ["sbatch", "--parsable"]
    fix = "run it on a login node of the cluster (tools/devcluster start launches a local cluster and prints SLURM_CONF)"
    try:
        result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment)
    except FileNotFoundError as error:
        raise UserError.of("hydra/launcher", "slurm", "the command sbatch is not installed on this machine", fix) from error
    except subprocess.TimeoutExpired as error:
        rule = f"sbatch did not respond within {TIMEOUT} s"
        raise UserError.of(
            "hydra/launcher", "slurm", rule, "check with squeue whether the job was submitted, and try again later"
        ) from error
    if result.returncode != 0:
        reason = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        raise UserError.of(
            "hydra/launcher", "slurm", f"Slurm rejected the job: {reason}", f"change the cluster options (cluster.*), or {fix}"
        )
    return int(result.stdout.strip().split(";")[0])  # "job id" or "job id;cluster"


def queued() -> set[int]:
    """Return the ids of this user's jobs that wait or run.

    Raises:
        UserError: squeue is not installed or did not answer.
    """
    command = ["squeue", "--me", "--noheader", "--format=%A"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        fix = "try again later: whether the earlier jobs of this sweep still run decides which ones are submitted"
        raise UserError.of("hydra/launcher", "slurm", f"squeue failed: {error}", fix) from error
    return {int(line) for line in printed.split()}


def is_pending(name: str, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether a job of this user with this name has not started yet.

    Raises:
        UserError: squeue is not installed or did not answer.
    """
    command = ["squeue", "--me", "--noheader", "--format=%A", "--states=PENDING", f"--name={name}"]
    try:
        return bool(subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True, env=environment).stdout.split())
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError.of("job", name, f"squeue failed: {error}", "try again later") from error


def cancel(jobs: Iterable[int]) -> bool:
    """Cancel jobs and return whether scancel succeeded. Completed jobs are not an error."""
    command = ["scancel", *map(str, jobs)]
    try:
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
