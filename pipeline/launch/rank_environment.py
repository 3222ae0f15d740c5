"""Variables of the environment that ranks on GPUs start with, unless the user or the site sets them. slurm/site.sh raises the limits."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import hardware
from pipeline.config.schema import RunConfig
from pipeline.config.stages import GPU_STAGES, TRAINING_STAGES


@dataclass(frozen=True)
class Default:
    """The default of a variable.

    Attributes:
        value: set if neither the variable nor one of `others` is.
        reason: why it is not left to PyTorch or NCCL.
        others: earlier and later names of the same setting.
    """

    value: str
    reason: str
    others: tuple[str, ...] = ()


#: What every rank on a GPU starts with.
DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Default(
        "3", "a rank whose collective fails or times out ends at once; aborting its communicators first can hang"
    ),
    "TORCH_FR_BUFFER_SIZE": Default(
        "2000", "PyTorch records the last collectives of a rank (flight recorder), by default none", ("TORCH_NCCL_TRACE_BUFFER_SIZE",)
    ),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": Default("1", "the record is written when a collective times out"),
    "NCCL_DEBUG": Default("WARN", "NCCL says why it fails, in the log of the job; by default it only returns an error code"),
}
#: What ranks on GPUs of NVIDIA start with besides; PyTorch does not support it on others.
NVIDIA_DEFAULTS = {
    "PYTORCH_CUDA_ALLOC_CONF": Default(
        "expandable_segments:True",
        "memory that is free, but in pieces, is used: buffers of buckets, micro-batches and warm-ups of the length have many sizes",
        ("PYTORCH_ALLOC_CONF",),
    ),
}
#: Where the flight recorder writes, below run_dir: a file for each rank, whose name ends with the rank.
FLIGHT_RECORDER = "flight_recorder/rank_"


def complete(environment: MutableMapping[str, str], config: RunConfig) -> None:
    """Set the defaults that are missing in the environment of a job. Stages and clusters without GPUs have none.

    Args:
        environment: of the supervisor, which the ranks inherit.
        config: of the job.
    """
    cluster = config.cluster
    if config.stage.name not in GPU_STAGES or not cluster.gpus_per_node:
        return
    amd = cluster.hardware is not None and hardware.load(cluster.hardware).device.startswith("AMD")
    defaults = DEFAULTS | ({} if amd else NVIDIA_DEFAULTS)
    if config.stage.name in TRAINING_STAGES:
        file = Path(config.run_dir).absolute() / FLIGHT_RECORDER
        defaults["TORCH_FR_DUMP_TEMP_FILE"] = Default(str(file), "the record is in the run directory", ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",))
    add(environment, defaults)


def add(environment: MutableMapping[str, str], defaults: Mapping[str, Default]) -> None:
    """Set the variables that neither the environment nor another name of the same setting has."""
    for name, default in defaults.items():
        if not any(environment.get(each) for each in (name, *default.others)):
            environment[name] = default.value
