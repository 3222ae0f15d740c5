"""The process groups of one rank: who it shares matrix products, layers and data with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from pipeline.config.layout import Coordinates, Layout

#: Longest wait for another rank; a slow shared file system can hold one up for long during a save.
TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the layout and its groups along each axis.

    Attributes:
        tensor: ranks that share this rank's matrix products.
        context: ranks that share this rank's sequences.
        expert: ranks that hold the other experts, and see other samples.
        data: ranks with the same weights: all data x context indices.
        pipeline: ranks that hold the other stages for this rank's samples.
        model: one whole copy of the model: all pipeline x expert x tensor ranks of this data and context index.
        tied_embedding: the ranks of the first and the last stage, which both hold a tied embedding; None on other ranks, or if one rank is
            both.
    """

    layout: Layout
    rank: int
    device: torch.device
    tensor: ProcessGroup
    context: ProcessGroup
    expert: ProcessGroup
    data: ProcessGroup
    pipeline: ProcessGroup
    model: ProcessGroup
    tied_embedding: ProcessGroup | None

    @property
    def where(self) -> Coordinates:
        """This rank's index on every axis."""
        return self.layout.coordinates(self.rank)


def start(rank: int, world_size: int, local_rank: int, address: str) -> torch.device:
    """Join the job's process group: NCCL on GPUs, gloo on CPUs. Returns this rank's device.

    Args:
        rank: this process among all.
        world_size: all of them.
        local_rank: this process among those of its node; names its GPU.
        address: where rank 0 listens, as torch writes it: `tcp://host:port`, or `env://` under torchrun.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size, timeout=TIMEOUT)
    return device


def init_fake(rank: int, world_size: int) -> torch.device:
    """Be one rank of a job that does not exist: collectives return at once, tensors have no storage."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    return torch.device("meta")


def stop() -> None:
    """Leave the job's process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def build(layout: Layout, device: torch.device) -> Mesh:
    """The mesh of this rank."""
    rank = dist.get_rank()
    assert dist.get_world_size() == layout.world_size, "the layout was made for another world size"
    ends = (layout.holder(0), layout.holder(layout.stage_count - 1))
    world = dist.group.WORLD
    assert world is not None
    groups = dict(_groups(world, replace(layout, schedule="", stages_per_rank=1, micro_batches=1), rank, ends))
    tied_embedding = groups.pop("tied_embedding")
    at_an_end = layout.coordinates(rank).pipeline in ends and ends[0] != ends[1]
    return Mesh(layout, rank, device, **groups, tied_embedding=tied_embedding if at_an_end else None)


@cache
def _groups(world: ProcessGroup, layout: Layout, rank: int, ends: tuple[int, int]) -> dict[str, ProcessGroup]:  # noqa: ARG001 - of the cache
    """The groups that a rank is in, by their name in Mesh; made once, since each costs threads and connections.

    A rank makes only its own groups, so the time does not grow with the world. Every rank makes equally many: torch names such a group by
    its members and the number of groups made before. What has the members of another group is not made anew: that is so on all ranks or on
    none, but for the ends, in whose place every rank between them makes a group of its own.
    """
    me = layout.coordinates(rank)
    made: dict[tuple[int, ...], ProcessGroup] = {}

    def new(members: tuple[int, ...]) -> ProcessGroup:
        return dist.new_group(list(members), timeout=TIMEOUT, use_local_synchronization=True)

    def group(**axes: Iterable[int]) -> ProcessGroup:
        """The ranks at all combinations of these indices, and at this rank's own on the other axes."""
        places = [replace(me, **dict(zip(axes, indices, strict=True))) for indices in product(*axes.values())]
        members = tuple(layout.rank(place) for place in places)
        if members not in made:
            made[members] = new(members)
        return made[members]

    stages, experts, pieces = range(layout.pipeline), range(layout.expert), range(layout.tensor)
    named = {
        "tensor": group(tensor=pieces),
        "context": group(context=range(layout.context)),
        "expert": group(expert=experts),
        "data": group(data=range(layout.data), context=range(layout.context)),
        "pipeline": group(pipeline=stages),
        "model": group(pipeline=stages, expert=experts, tensor=pieces),
    }
    if ends[0] == ends[1] or layout.pipeline == 2:
        return named | {"tied_embedding": named["pipeline"]}
    if me.pipeline in ends:
        return named | {"tied_embedding": new(tuple(layout.rank(replace(me, pipeline=end)) for end in ends))}
    return named | {"tied_embedding": new((rank,))}
