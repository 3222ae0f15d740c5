"""Slurm jobs: rendering as a pure function.

slurm/STAGE.sbatch defines how a stage runs inside a job; conf/cluster/ defines the sbatch options of a cluster.
A rendered job consists of the options of the cluster and a call of the script of the stage.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import ranks
from pipeline.common.errors import Violation
from pipeline.common.ranks import Ranks
from pipeline.config.cluster import ClusterConfig
from pipeline.config.command_line import key_of
from pipeline.config.paths import batch_scripts
from pipeline.config.stages import GPU_STAGES, ONE_TASK_STAGES, TRAINING_STAGES
from pipeline.launch import queues, site

log = logging.getLogger("pipeline")

#: Time before the limit at which Slurm signals a training job to write a checkpoint, as in slurm/pretrain.sbatch. Slurm may signal a
#: minute earlier.
SIGNAL_SECONDS = 180
#: Options that a cluster may require.
REQUIRABLE = ("account", "partition", "qos", "memory")


@dataclass(frozen=True)
class Job:
    """A batch job: a stage with its overrides.

    Attributes:
        stage: name of the stage; the job runs slurm/STAGE.sbatch.
        overrides: arguments of `python -m pipeline`, without `stage=`.
        output: file for standard output and error, %j being the job id; its folder must exist when the job starts.
        conf: the configuration files that the job reads; those of the package when None.
        scripts: folder of the batch scripts (paths.batch_scripts); slurm/ in `directory` when None.
        python: the interpreter, unless the file of the site sets another one; that of its environment when None.
        snapshot: the snapshot of what was submitted (launch/snapshot.py).
        after: id of the job that must succeed before this one starts; without success, Slurm cancels this one.
        waits_for: id of the job that must have ended before this one starts.
    """

    name: str
    stage: str
    overrides: tuple[str, ...]
    directory: Path
    output: str
    conf: Path | None = None
    scripts: Path | None = None
    python: Path | None = None
    snapshot: Path | None = None
    after: str | None = None
    waits_for: str | None = None


def here(**fields: Any) -> Job:
    """Return a job of this working directory, with its scripts and its interpreter: this one, unless the site's file activates one there.

    A job that inherits no variables (sbatch --export=NONE) has no other way to find it. `fields` are the others of Job.
    """
    directory = Path.cwd()
    scripts = batch_scripts(directory)
    python = None if scripts is None and (directory / ".venv").exists() else Path(sys.executable)
    return Job(directory=directory, scripts=scripts, python=python, **fields)


def log_file(folder: Path, name: str, job_id: str | int | None = None) -> str:
    """Return the path of the output of a job; without its id as a pattern for sbatch, in which % is escaped as %%."""
    path = str(folder.absolute())
    return f"{path.replace('%', '%%')}/{name}-%j.out" if job_id is None else f"{path}/{name}-{job_id}.out"


def render(job: Job, cluster: ClusterConfig) -> str:
    """Render the batch script passed to sbatch."""
    cluster = placed(cluster, job.stage, cluster.nodes)
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {_directive(option)}" for option in _options(job, cluster)]
    variables = {
        "PIPELINE_CONF": job.conf,
        "PIPELINE_SNAPSHOT": job.snapshot,
        "PIPELINE_SLURM": job.scripts,
        "PIPELINE_PYTHON": job.python or (sys.executable if job.scripts else None),
    }
    script = f"{job.scripts or 'slurm'}/{job.stage}.sbatch"
    lines += [
        "set -euo pipefail",
        *site.shell_lines(cluster, job.stage),
        *(f"export {name}={shlex.quote(str(value))}" for name, value in variables.items() if value),
        " \\\n  ".join(["exec bash " + shlex.quote(script), *map(shlex.quote, job.overrides)]),
    ]
    return "\n".join(lines) + "\n"


def _options(job: Job, cluster: ClusterConfig) -> Iterator[str]:
    """Yield the sbatch options of a job."""
    yield f"--job-name={job.name}"
    yield f"--chdir={job.directory}"
    yield f"--output={job.output}"
    yield "--open-mode=append"  # a requeued job continues its log
    yield from size_options(cluster, job.stage, cluster.nodes)
    if job.stage in TRAINING_STAGES:
        yield requeue_option(cluster)
        yield f"--signal=USR1@{SIGNAL_SECONDS}"
    if job.after:
        yield f"--dependency=afterok:{job.after}"
        yield "--kill-on-invalid-dep=yes"
    if job.waits_for:
        yield f"--dependency=afterany:{job.waits_for}"
    for option in site_options(cluster, job.stage):  # the first job of a chain waits for what the user names, and so the others do
        if not (job.after and re.match(r"--dependency\b|-d\b", option)):
            yield option


def node_range(cluster: ClusterConfig, stage: str, nodes: int) -> tuple[int, int]:
    """Return the fewest and the most nodes that a job asks for, with the spare nodes of training."""
    if stage not in TRAINING_STAGES:
        return nodes, nodes
    least = nodes if cluster.min_nodes is None else min(cluster.min_nodes, nodes)
    return least + cluster.spares, nodes + cluster.spares


def placed(cluster: ClusterConfig, stage: str, nodes: int) -> ClusterConfig:
    """Return the options of a job with the partition, QoS and time of the first queue that fits (queues.placed).

    Of a stage that does not train, cluster.time=longest is at most the time in slurm/STAGE.sbatch.
    """
    script = (batch_scripts(Path.cwd()) or Path("slurm")) / f"{stage}.sbatch"
    text = script.read_text(encoding="utf-8") if stage not in TRAINING_STAGES and script.is_file() else ""
    limit = re.search(r"^#SBATCH --time=(\S+)$", text, re.MULTILINE)
    return queues.placed(cluster, *node_range(cluster, stage, nodes), limit[1] if limit else None)


def requeue_option(cluster: ClusterConfig) -> str:
    """Return whether Slurm may put a training job back into the queue, as an sbatch option: not at sites that continue by a chain."""
    return "--requeue" if cluster.continuation == "requeue" else "--no-requeue"


def size_options(cluster: ClusterConfig, stage: str, nodes: int) -> list[str]:
    """Return the sbatch options for a number of nodes. A training job has spare nodes besides, and accepts fewer, such as --nodes=8-64.

    With --ntasks-per-node sbatch would ask for the tasks of the fewest nodes, and Slurm grants no more nodes than there are tasks. So a
    range asks for the cores of a node, and the supervisor starts cluster.tasks_per_node ranks on each. Jobs that can go on without a node
    are kept by Slurm (--no-kill).
    """
    least, most = node_range(cluster, stage, nodes)
    if least == most:
        no_kill = ["--no-kill"] if stage in TRAINING_STAGES and cluster.spares else []
        return [f"--nodes={most}", f"--ntasks-per-node={cluster.tasks_per_node}", *no_kill]
    return [f"--nodes={least}-{most}", f"--mincpus={cluster.tasks_per_node * cluster.cpus_per_task}", "--no-kill"]


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


def one_task(cluster: ClusterConfig, stage: str, overrides: Iterable[str]) -> ClusterConfig:
    """Return the options of the job of a stage: those of the cluster, or one task, with the cores of a node's tasks, if the stage has one.

    Args:
        overrides: settings of this job alone; with a number of nodes or tasks among them, the options are those of the cluster.
    """
    given = {key_of(override) for override in overrides}
    if stage not in ONE_TASK_STAGES or given & {"cluster.nodes", "cluster.tasks_per_node"}:
        return cluster
    cores = cluster.cpus_per_task * (1 if "cluster.cpus_per_task" in given else cluster.tasks_per_node)
    return dataclasses.replace(cluster, nodes=1, tasks_per_node=1, cpus_per_task=cores)


def _directive(option: str) -> str:
    """Format an option for an #SBATCH line, quoted if it contains spaces, # or quotes."""
    if re.fullmatch(r"[\w@%+=:,./-]*|-\w [\w@%+=:,./-]+", option):  # --name=value, or -N value
        return option
    name, equals, value = option.partition("=")
    return name + equals + '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def sbatch_line(cluster: ClusterConfig, stage: str, world_size: int, overrides: Iterable[str], scripts: Path | None = None) -> str:
    """Return the sbatch command that starts a stage, to be run in the same working directory.

    Args:
        overrides: arguments of `python -m pipeline`; stage= and dry_run arguments are removed.
        scripts: folder of the batch scripts (paths.batch_scripts); slurm/ in the working directory when None.
    """
    nodes = -(-world_size // cluster.tasks_per_node)
    size = size_options(cluster, stage, nodes)
    if nodes * cluster.tasks_per_node != world_size and cluster.min_nodes is None:  # the last node has fewer ranks
        size.append(f"--ntasks={world_size}")
    if stage in TRAINING_STAGES and cluster.continuation != "requeue":  # slurm/STAGE.sbatch has --requeue
        size.append(requeue_option(cluster))
    cluster = placed(cluster, stage, nodes)
    kept = [o for o in overrides if not re.match(r"\+*(stage=|dry_run[.=])", o)]
    options = list(site_options(cluster, stage))
    if cluster.name == "local" and not any(key_of(word) == "cluster.time" for word in kept):
        options.remove(f"--time={cluster.time}")  # slurm/STAGE.sbatch has a longer one
    variables = ["env", f"PIPELINE_SLURM={scripts}", f"PIPELINE_PYTHON={sys.executable}"] if scripts else []
    return shlex.join([*variables, "sbatch", *size, *options, f"{scripts or 'slurm'}/{stage}.sbatch", *kept])


def violations(cluster: ClusterConfig, stage: str, directory: Path) -> list[Violation]:
    """Return the reasons why a job of this stage cannot be rendered or submitted."""
    problems = []
    scripts = batch_scripts(directory) or directory / "slurm"
    if not (scripts / f"{stage}.sbatch").is_file():
        stages = ", ".join(sorted(p.stem for p in scripts.glob("*.sbatch")))
        problems.append(Violation("stage", stage, f"has no {scripts}/{stage}.sbatch", f"choose one of {stages}, or create that file"))
    texts = {name: getattr(cluster, name) for name in ("account", "partition", "qos", "memory")}
    texts |= {f"sbatch[{i}]": option for i, option in enumerate(cluster.sbatch)}
    for name, text in texts.items():
        if text is not None and not text.isprintable():
            problems.append(Violation(f"cluster.{name}", repr(text), "must be a single printable line", f"fix cluster.{name}"))
    problems += [
        Violation("cluster.sbatch", option, "must be an sbatch option in command-line form", "write --name=value")
        for option in cluster.sbatch
        if not option.startswith("-")
    ]
    unknown = [key for key in cluster.required if key not in REQUIRABLE]
    problems += [Violation("cluster.required", key, f"must be one of {', '.join(REQUIRABLE)}", "remove it") for key in unknown]
    # Slurm reads a plain number as minutes, and YAML parses an unquoted 24:00:00 as 86400, which would be two months.
    if cluster.time != queues.LONGEST and not ranks.is_slurm_limit(cluster.time):
        rule = "must have the form days-hours, hours:minutes:seconds or minutes:seconds"
        problems.append(Violation("cluster.time", cluster.time, rule, 'use one of these forms, quoted in a YAML file: "24:00:00"'))
    else:
        problems += queues.violations(cluster, *node_range(cluster, stage, cluster.nodes))
    return problems


def missing(cluster: ClusterConfig) -> list[str]:
    """Return the keys that the cluster requires (cluster.required) and that are not set, nor as SBATCH_ACCOUNT and the like."""
    given = [option.lstrip("-").partition("=")[0] for option in cluster.sbatch]
    given += [key for key in cluster.required if os.environ.get(f"SBATCH_{key.upper()}")]
    given += [key for key in ("partition", "qos") if any(getattr(queue, key) for queue in cluster.queues)]
    return [key for key in cluster.required if getattr(cluster, key, None) is None and key not in given]


def not_given(cluster: ClusterConfig) -> list[Violation]:
    """Return what a job cannot be submitted without: the keys that `missing` returns."""
    rule = f"is not set, and cluster={cluster.name} requires it (cluster.required)"
    return [
        Violation(f"cluster.{key}", None, rule, f"set cluster.{key}=NAME, or cluster.required=[] if Slurm has a default")
        for key in missing(cluster)
    ]


def warn_of_other_size(cluster: ClusterConfig, stage: str, here: Ranks) -> None:
    """Warn on rank 0 if a job of srun has another size than its cluster=NAME: sbatch does not read conf/cluster/."""
    nodes, tasks = cluster.nodes, cluster.tasks_per_node
    trains = here.launcher == "srun" and here.rank == 0 and stage in GPU_STAGES and cluster.min_nodes is None
    if trains and cluster.name != "local" and here.world_size != nodes * tasks:
        size = f"cluster={cluster.name} has {nodes} nodes x {tasks} tasks"
        log.warning("this job has %d ranks, %s: sbatch does not read conf/cluster; dry_run=true prints its options", here.world_size, size)


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job without those of the job itself and of its launcher, for a job that it submits."""
    launcher = r"SLURM(?!_CONF$)|PMIX?_|MPI_|OMPI_|TORCHELASTIC_|GROUP_|ROLE_"
    rank = r"(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|PIPELINE_ENDS$|(CUDA|ROCR|HIP)_VISIBLE_DEVICES$"
    return {name: value for name, value in environment.items() if not re.match(f"{launcher}|{rank}", name)}
