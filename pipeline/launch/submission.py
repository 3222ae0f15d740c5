"""The sbatch command that stage=plan and a dry run print, and what it still lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config import hardware
from pipeline.config.cluster import ClusterConfig
from pipeline.config.paths import batch_scripts
from pipeline.config.schema import RunConfig
from pipeline.launch import job, live, queues, site


def lines(config: RunConfig, world_size: int, arguments: Sequence[str], *, has_weights: bool) -> Iterator[str]:
    """Yield the command, and a line for everything that it lacks.

    Args:
        config: of the job, whose stage is that of the job.
        world_size: ranks.
        arguments: of `python -m pipeline`, for this job.
        has_weights: whether the job has a checkpoint to start from.
    """
    cluster = live.corrected(config.cluster)
    if cluster.tasks_per_node == 1 and world_size != cluster.nodes:
        yield f"choose cluster=NAME, or set cluster.tasks_per_node to the GPUs of a node{_known(cluster)}, for the sbatch line"
        return
    nodes = -(-world_size // cluster.tasks_per_node)
    if misfit := list(queues.violations(cluster, *job.node_range(cluster, config.stage.name, nodes))):
        yield from (f"{violation.key}={violation.value}: {violation.rule}: {violation.fix}" for violation in misfit)
        return
    yield job.sbatch_line(cluster, config.stage.name, world_size, arguments, batch_scripts(Path.cwd()))
    for key in job.missing(cluster):
        yield f"  cluster.{key} is not set, and cluster={cluster.name} requires it: add cluster.{key}=NAME, or --{key}=NAME to this line"
    if (config.stage.name == "finetune" or config.lora.rank) and not has_weights:
        yield "  checkpoint.initialize_from is not set: add the run directory or checkpoint with the weights of this model"
    yield from _gpus(cluster)
    if text := site.other_architecture(cluster):
        yield f"  {text}"


def _gpus(cluster: ClusterConfig) -> Iterator[str]:
    """Yield what is wrong with the GPUs of a job: each rank has one."""
    ranks, gpus = cluster.tasks_per_node, cluster.gpus_per_node
    requested = any(option.startswith(("--gpus", "--gres", "-G", "--exclusive")) for option in cluster.sbatch)
    if gpus and gpus != ranks:
        yield f"  cluster.gpus_per_node={gpus} and cluster.tasks_per_node={ranks} differ, and each rank has one GPU: set both to the same"
    elif cluster.hardware and not gpus and not requested:
        yield f"  no GPUs are requested: add cluster.gpus_per_node={ranks}, unless the partition gives whole nodes"
    elif cluster.hardware and ranks == 1 < hardware.load(cluster.hardware).gpus_per_node:
        yield f"  one rank a node: set cluster.tasks_per_node to the GPUs of a node{_known(cluster)}"


def _known(cluster: ClusterConfig) -> str:
    """The GPUs of a node that the file of the hardware has, as a remark."""
    return f" ({hardware.load(cluster.hardware).gpus_per_node} in conf/hardware/{cluster.hardware}.yaml)" if cluster.hardware else ""
