"""Runs that are longer than a time limit, as a chain of jobs (cluster.continuation=chain): each job submits the next one when it begins.

The next job waits in the queue meanwhile (--dependency=afterany), so it starts soon after this one has ended, however that happens. A run
that is finished, fails for good or is canceled cancels it. Jobs that wait for the success of this one wait for the next one instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.config.paths import batch_scripts
from pipeline.config.schema import RunConfig
from pipeline.launch import job, moldable, slurm
from pipeline.launch.allocation import Allocation

log = logging.getLogger("pipeline")

#: sbatch options that the next job takes from the variables of this one.
_FROM_VARIABLES = {
    "job-name": "SLURM_JOB_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT",
    "qos": "SLURM_JOB_QOS",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
    "gpus-per-node": "SLURM_GPUS_PER_NODE",
    "mem": "SLURM_MEM_PER_NODE",
    "mem-per-cpu": "SLURM_MEM_PER_CPU",
}


def options(config: RunConfig, granted: Allocation, fields: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Return the sbatch options of the next job: those of this one, and those of the cluster that no variable has.

    Args:
        config: of the run.
        granted: the nodes of this job.
        fields: of this job, from slurm.facts.
        environment: of this job.
    """
    found = [f"--{name}={environment[variable]}" for name, variable in _FROM_VARIABLES.items() if environment.get(variable)]
    if moldable.follows_nodes(config):
        found += moldable.size_options(config, len(granted.nodes), granted.tasks_per_node)
    else:
        found += [f"--nodes={len(granted.nodes)}"]
        found += [] if granted.tasks_per_node is None else [f"--ntasks-per-node={granted.tasks_per_node}"]
        found += ["--no-kill"] * (config.cluster.spares > 0)
    found += ["--no-requeue"] if fields.get("Requeue") == "0" else []  # slurm/STAGE.sbatch has --requeue
    found += [f"--{name}={fields[field]}" for name, field in (("time", "TimeLimit"), ("output", "StdOut")) if fields.get(field)]
    return [*found, "--open-mode=append", f"--dependency=afterany:{granted.job}", *config.cluster.sbatch]


def submit(config: RunConfig, arguments: Sequence[str], granted: Allocation, fields: Mapping[str, str]) -> str | None:
    """Submit the next job of the chain and return its id, None if Slurm refuses it, which is logged.

    Args:
        config: of the run.
        arguments: of `python -m pipeline`; the first one is the stage.
        granted: the nodes of this job.
        fields: of this job, from slurm.facts.
    """
    script = f"{batch_scripts(Path.cwd()) or 'slurm'}/{config.stage.name}.sbatch"
    kept = [argument for argument in arguments if not argument.startswith("stage=")]
    command = ["sbatch", "--parsable", *options(config, granted, fields, os.environ), script, *kept]
    try:
        number = slurm.command(command, job.outside(os.environ)).strip().partition(";")[0]
    except slurm.SlurmError as error:
        log.error("the next job of the chain was not submitted, so the run ends with this one: %s", error)
        return None
    log.info("job %s is the next one of the chain", number)
    return number


def hand_over(current: str, successor: str, exclude: Sequence[str]) -> None:
    """Let the next job continue the run: without some nodes, and with the jobs that wait for this one."""
    try:
        slurm.move_dependents(current, successor)
        if exclude:
            slurm.command(["scontrol", "update", f"JobId={successor}", f"ExcNodeList={','.join(exclude)}"])
    except slurm.SlurmError as error:
        log.warning("job %s continues, but was not changed: %s", successor, error)
