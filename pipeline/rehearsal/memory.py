"""Memory of a rehearsed rank: what PyTorch's caching allocator says at the parts of a step, and how much of it is of which kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline.training.trainer import Trainer

#: Name of the moments before a part that is of interest.
BETWEEN = "between steps"


@dataclass(frozen=True)
class Moment:
    """The caching allocator at the end of a part of a step, bytes.

    Attributes:
        name: start, forward, backward, optimizer, validation or save; or BETWEEN.
        allocated: by tensors.
        peak: most that tensors have used since the part began.
        reserved: most that the allocator had of the device since then.
        retries: how often it had to free its cache to get memory, since the process began.
        fragmented: reserved, and of no use for a larger tensor: inactive parts of blocks that are in use.
    """

    name: str
    allocated: int
    peak: int
    reserved: int
    retries: int
    fragmented: int


@dataclass
class Moments:
    """Collects moments. Each `note` ends a part and begins the next one."""

    entries: list[Moment] = field(default_factory=list)

    def note(self, name: str) -> Moment:
        """Note a moment, and reset the peaks."""
        stats: dict[str, int] = torch.cuda.memory_stats()
        moment = Moment(
            name,
            stats["allocated_bytes.all.current"],
            stats["allocated_bytes.all.peak"],
            stats["reserved_bytes.all.peak"],
            stats["num_alloc_retries"],
            stats["inactive_split_bytes.all.current"],
        )
        self.entries.append(moment)
        torch.cuda.reset_peak_memory_stats()
        return moment

    def last(self, name: str) -> Moment:
        """The last moment of a name."""
        return next(moment for moment in reversed(self.entries) if moment.name == name)

    @property
    def peak(self) -> Moment:
        """The moment with the highest peak."""
        return max(self.entries, key=lambda moment: moment.peak)

    @property
    def reserved(self) -> int:
        """Most that the allocator ever had."""
        return max(moment.reserved for moment in self.entries)


@dataclass(frozen=True)
class ByKind:
    """Bytes of a rank at its peak, by kind as in planner/peak_memory.py.

    Attributes:
        weights: parameters and buffers of the model, at rest.
        optimizer: master weights, moments and averages.
        libraries: workspaces of the libraries of matrix products, and whatever else stays allocated between steps.
        passes: everything else at the peak: activations, gathered weights, gradients and temporary tensors.
        fragmentation: reserved by the allocator beyond the peak.
        outside: what CUDA and NCCL take, which a rehearsal cannot measure: as the planner assumes.
    """

    weights: int
    optimizer: int
    libraries: int
    passes: int
    fragmentation: int
    outside: int

    @property
    def total(self) -> int:
        """What the rank needs of the device."""
        return self.weights + self.optimizer + self.libraries + self.passes + self.fragmentation + self.outside


def state_bytes(trainer: Trainer) -> tuple[int, int]:
    """Return the bytes of (weights, optimizer state) on the device, now."""
    model: list[Any] = [*trainer.model.stages.parameters(), *trainer.model.stages.buffers(), *trainer.model.quantized]
    fixed, saved = trainer.model.fixed_names(), list[Any]()
    for fragment in trainer.engine.fragments():  # under ZeRO 3, frozen weights are partitions
        (model if fragment.piece.name in fixed else saved).extend(fragment.tensors.values())
    weights = _storages(tensor for value in model for tensor in _tensors(value))
    optimizer = _storages(tensor for value in saved for tensor in _tensors(value))
    # Under ZeRO 3, the rounded partitions if the master weights are in host memory; else the partitions are the master weights.
    weights |= {address: size for address, size in _storages(trainer.engine.partitions()).items() if address not in optimizer}
    optimizer_only = {address: size for address, size in optimizer.items() if address not in weights}
    return sum(weights.values()), sum(optimizer_only.values())


def by_kind(moments: Moments, state: tuple[int, int], outside: int) -> ByKind:
    """Divide the peak into kinds.

    Args:
        moments: of the rehearsal.
        state: of state_bytes, when no gathered weights are allocated.
        outside: of ByKind.
    """
    weights, optimizer = state
    between = min(moment.allocated for moment in moments.entries if moment.name == BETWEEN)
    libraries = max(0, between - weights - optimizer)
    peak = moments.peak.peak
    return ByKind(weights, optimizer, libraries, peak - weights - optimizer - libraries, moments.reserved - peak, outside)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of a weight, which may be quantized."""
    return [value] if isinstance(value, Tensor) else list(value.buffers())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of the storages on the device that tensors use."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.is_cuda)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
