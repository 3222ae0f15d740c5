"""What a run that is out of memory says: the plan beside what was used, and the settings that need less, by how much less."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint import native
from pipeline.common import ends, knobs
from pipeline.common.errors import RunFailed
from pipeline.common.ranks import Ranks
from pipeline.config import hardware as hardware_files
from pipeline.config import phases
from pipeline.config.hardware import Hardware
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.config.zero_group import JOB
from pipeline.parallel import mesh as meshes
from pipeline.planner.plan import JobPlan, hardware_of, plan

GB = 1e9
#: What needs less memory than a configuration, in the usual order of effect, where no GPU is known to plan with.
USUAL_ORDER = "training.micro_batch_size, training.activation_checkpointing, parallel.zero_stage, parallel.tensor, parallel.pipeline"
#: Most seconds for the plans of other settings: the supervisor of a job ends its ranks soon after the first failure.
SECONDS = 8.0
#: What PyTorch says where the host has no memory left for a tensor.
_HOST = "DefaultCPUAllocator: can't allocate memory"


@dataclass(frozen=True)
class Used:
    """Memory of a GPU as it was used, bytes.

    Attributes:
        allocated: by tensors, at most.
        reserved: by PyTorch's caching allocator, at most.
        outside: what others use: contexts, NCCL, other processes.
    """

    allocated: int
    reserved: int
    outside: int
    capacity: int

    @classmethod
    def of_this_gpu(cls) -> Used | None:
        """Return what this process has used; None without a GPU."""
        if not torch.cuda.is_initialized():
            return None
        free, capacity = torch.cuda.mem_get_info()
        outside = capacity - free - torch.cuda.memory_reserved()
        return cls(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), outside, capacity)

    def __str__(self) -> str:
        sizes = (f"{size / GB:.1f} GB {name}" for name, size in asdict(self).items() if name != "capacity")
        return f"{', '.join(sizes)}, of {self.capacity / GB:.1f} GB"


@contextmanager
def explained(config: RunConfig, ranks: Ranks) -> Iterator[None]:
    """Turn the errors of a block that is out of memory into one message.

    Raises:
        RunFailed: the GPU or the host is out of memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (of_gpu := of_device(error)) is not None:
            used = Used.of_this_gpu()
            reason = f"out of memory: {wanted(of_gpu)}{'' if used is None else f' ({used})'}"
            config = phases.at(config, max(map(native.step_of, native.complete(Path(config.run_dir))), default=0))
            raise RunFailed(reason, ends.where(of_gpu), partial(_details, config, ranks.world_size, used)) from error
        if not isinstance(error, MemoryError) and _HOST not in str(error):
            raise
        said = str(error).partition("\n")[0] or "MemoryError"
        fix = "use fewer ranks of a node, ask Slurm for more memory (cluster.memory), or set checkpoint.async_save=off"
        raise RunFailed(f"out of memory on the host: {said}\n    fix: {fix}", ends.where(error)) from error


def of_device(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """Return the error of a GPU without memory that caused an error: PyTorch's pipeline schedules raise another one from it."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error


def wanted(error: torch.OutOfMemoryError) -> str:
    """Return what the GPU had no memory for, as PyTorch says it."""
    return str(error).partition(". GPU")[0].partition("\n")[0]


def _details(config: RunConfig, world_size: int, used: Used | None) -> Iterator[str]:
    """Yield the table of memory and the settings that need less; the order alone if no GPU is known to plan with."""
    meshes.abort_process_group()  # the planner has one of its own
    try:
        hardware = _hardware(config)
        if hardware is not None:
            yield from table(plan(config, world_size, hardware), used)
            yield from fixes(config, world_size, hardware)
            return
        why = "cluster.hardware names no GPU"
    except Exception as error:  # of the planner: the run has failed for another reason
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    yield f"    fix: reduce memory by {USUAL_ORDER}; the memory was not planned ({why})"


def _hardware(config: RunConfig) -> Hardware | None:
    """The GPU of the job: that of the configuration, else that of this process."""
    if config.cluster.hardware is not None:
        return hardware_of(config)
    return hardware_files.of_device(torch.cuda.get_device_name()) if torch.cuda.is_initialized() else None


def table(planned: JobPlan, used: Used | None) -> Iterator[str]:
    """Yield the planned memory of the fullest rank by kind, and what this rank used."""
    memory = planned.estimate.memory
    yield f"planned peak of a rank (pipeline rank {planned.estimate.pipeline_rank}, the fullest)"
    for name, size in asdict(memory).items():
        if size and name != "host":
            yield f"  {name:<14}{size / GB:9.2f} GB"
    yield f"  {'total':<14}{memory.total / GB:9.2f} GB of {planned.hardware.memory_gb:.1f} GB"
    if used is None:
        return
    yield "used by this rank"
    for name, size in asdict(used).items():
        yield f"  {name:<14}{size / GB:9.2f} GB"
    if used.reserved - used.allocated > 0.1 * used.capacity:
        yield "  a tenth of the memory is reserved and not allocated: try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def fixes(config: RunConfig, world_size: int, hardware: Hardware) -> Iterator[str]:
    """Yield the settings that need less memory, each alone, the most effective one first; those that are planned within SECONDS."""
    before = plan(config, world_size, hardware).estimate.memory.total
    known = {str(violation) for violation in check.violations(config, world_size)}
    planned = []
    deadline = time.monotonic() + SECONDS
    for key, value in _less(config):
        if time.monotonic() > deadline:
            break
        changed = knobs.changed(config, {key: value})
        if {str(violation) for violation in check.violations(changed, world_size)} <= known:
            planned.append((plan(changed, world_size, hardware).estimate.memory.total, f"{key}={value}"))
    better = sorted((total, setting) for total, setting in planned if total < before)
    yield "settings that need less, each alone" if better else "no single setting of this layout needs less: use more nodes"
    for total, setting in better:
        yield f"  {setting:<44}{total / GB:9.2f} GB planned, {(before - total) / GB:.2f} GB less"


def _less(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values that may need less memory than a configuration."""
    parallel, training = config.parallel, config.training
    if training.micro_batch_size > 1:
        yield "training.micro_batch_size", training.micro_batch_size // 2
    kinds = ("offload", "full", "selective", "none")
    for kind in kinds[: kinds.index(training.activation_checkpointing)]:
        yield "training.activation_checkpointing", kind
    if training.activation_checkpointing == "selective" and training.activation_budget is not None:
        yield "training.activation_budget", training.activation_budget / 2
    for stage in range(3, parallel.zero_stage, -1):
        yield "parallel.zero_stage", stage
    if parallel.zero_group != JOB:
        yield "parallel.zero_group", JOB
    for axis in ("tensor", "pipeline", "context"):
        yield f"parallel.{axis}", 2 * getattr(parallel, axis)
