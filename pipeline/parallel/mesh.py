"""The device mesh: creation of the process groups of one rank along every mesh axis."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup

from pipeline.common.errors import ToBeContinued, UserError
from pipeline.common.ranks import Ranks
from pipeline.config.layout import Coordinates, Layout
from pipeline.parallel import cpu_affinity, open_files, rehearsed_group, rendezvous
from pipeline.parallel import device as rank_device
from pipeline.parallel.serial_gloo import SERIAL_GLOO

#: Loading and saving of checkpoints on a slow shared file system may take this many times the timeout of a step.
INPUT_OUTPUT = 6.0
#: Default of training.timeout_minutes.
MINUTES = 10.0


@dataclass(frozen=True)
class Mesh:
    """The layout, this rank, and its process group along each axis.

    Attributes:
        tensor: ranks that shard the same matrix products.
        context: ranks that shard the same sequences.
        expert: ranks that hold the other experts; each processes different samples.
        data: ranks with the same experts: all data x context indices.
        dense: ranks with the same weights other than experts: all data x expert x context indices.
        pipeline: ranks that hold the other stages for the same samples.
        tied_embedding: the ranks of the first and the last stage, which both hold a tied embedding; None on other ranks, or if one rank
            holds both stages.
        node_ranks: number of ranks of a node; None if all ranks are on one.
        dense_shards, data_shards: the ranks of `dense` and of `data` over which ZeRO shards; None if it shards over all of them.
        dense_replicas, data_replicas: ranks with the same partition in the other groups of ZeRO; likewise None.
        tensor_expert: all tensor and expert ranks with the same data and context index, if whole experts are distributed over them; else
            None.
    """

    layout: Layout
    rank: int
    device: torch.device
    tensor: ProcessGroup
    context: ProcessGroup
    expert: ProcessGroup
    data: ProcessGroup
    dense: ProcessGroup
    pipeline: ProcessGroup
    tied_embedding: ProcessGroup | None
    node_ranks: int | None = None
    dense_shards: ProcessGroup | None = None
    dense_replicas: ProcessGroup | None = None
    data_shards: ProcessGroup | None = None
    data_replicas: ProcessGroup | None = None
    tensor_expert: ProcessGroup | None = None

    @property
    def dispatch(self) -> ProcessGroup:
        """The ranks over which the experts are distributed, in the order of their experts: tokens are sent to them."""
        return self.expert if self.tensor_expert is None else self.tensor_expert

    def zero_groups(self, *, experts: bool) -> tuple[ProcessGroup, ProcessGroup | None]:
        """Return the ranks over which ZeRO shards weights, those of experts or the others, and those with the same partition, if any."""
        shards, replicas = (self.data_shards, self.data_replicas) if experts else (self.dense_shards, self.dense_replicas)
        if shards is None:
            return self.data if experts else self.dense, None
        return shards, replicas if replicas is not None and replicas.size() > 1 else None

    @property
    def tensor_in_node(self) -> bool:
        """Whether all tensor ranks are on one node; they have successive numbers."""
        return self.node_ranks is None or self.node_ranks % self.layout.tensor == 0

    @property
    def coordinates(self) -> Coordinates:
        """This rank's coordinates: its index on every mesh axis."""
        return self.layout.coordinates(self.rank)

    @property
    def all_ranks(self) -> tuple[ProcessGroup, ...]:
        """Groups that together connect all ranks: a sum over one after the other is a sum over all ranks."""
        return self.dense, self.pipeline, self.tensor


def init_distributed(
    rank: int, world_size: int, local_rank: int, init_method: str, minutes: float = MINUTES, device: torch.device | None = None
) -> torch.device:
    """Initialize the default process group and return this rank's device.

    The default group has all ranks. It serves barriers and objects before and after training and in checkpoints, over gloo. Tensors of a
    step are reduced over the groups of the mesh. On GPUs it has NCCL too, whose communicator is created by the first collective on a GPU.

    Args:
        rank, world_size: global rank of this process, and the number of ranks.
        local_rank: rank within the node; selects the GPU.
        init_method: URL of the rendezvous with rank 0: `tcp://host:port`, or `env://` under torchrun.
        minutes: training.timeout_minutes. Ranks wait for each other INPUT_OUTPUT times as long, since they load and save for so long.
        device: of this rank; its GPU, or the CPU without any, when None.

    Raises:
        UserError: another rank uses the GPU of this one, or rank 0 may not open a connection to every rank.
        RunFailed, ToBeContinued: as rendezvous.meet.
    """
    timeout = timedelta(minutes=minutes * INPUT_OUTPUT)
    device = device or rank_device.choose(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        cpu_affinity.bind(device)
    open_files.allow_many_connections()
    # PyTorch 2.13 renamed collectives, 2.11 has the old names only: two lines per rank in every job's log.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    if rank == 0 and init_method.startswith("tcp://"):
        open_files.check_store(world_size)
    backend = f"cpu:{SERIAL_GLOO},cuda:nccl" if device.type == "cuda" else SERIAL_GLOO
    if world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        if init_method.startswith(("tcp://", "env://")):
            store = rendezvous.meet(rank, world_size, local_rank, init_method, 60 * minutes / 2)
            store.set_timeout(timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        else:
            dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
        rank_device.claim(device, rank, dist.distributed_c10d._get_default_store())
    return device


def init_fake(rank: int, world_size: int) -> torch.device:
    """Initialize a fake process group, whose collectives return immediately, and return the meta device."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    return torch.device("meta")


def init_rehearsed(rank: int, world_size: int) -> torch.device:
    """Initialize the default process group of a job of which only this rank exists (rehearsed_group.py), and return its device."""
    device = rank_device.choose(0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rehearsed_group.initialize(rank, world_size)
    rank_device.claim(device, rank, dist.distributed_c10d._get_default_store())
    return device


@contextmanager
def process_group(ranks: Ranks, minutes: float, device: torch.device | None = None) -> Iterator[torch.device]:
    """The default process group of the ranks of a job; yields this rank's device. Arguments and errors as of init_distributed.

    It is destroyed at a regular end alone. NCCL flushes its communicators when it is destroyed, and so waits for ranks that wait for this
    one in a collective: the error that has ended this rank would never be reported. After an error the process ends without that.
    """
    abort_process_group()  # of an earlier run of a sweep in this process, which has ended with an error
    device = init_distributed(ranks.rank, ranks.world_size, ranks.local_rank, ranks.rendezvous(), minutes, device)
    try:
        yield device
    except ToBeContinued:
        dist.barrier()  # the launcher terminates all ranks when the first one exits
        destroy_process_group()
        raise
    destroy_process_group()


def destroy_process_group() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_process_group() -> None:
    """Abort the default process group, if there is one, without waiting for other ranks; after an error."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def store_connection() -> Any:
    """A new connection to the key-value store of the job, for use in another thread."""
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined] # every store but HashStore has it


def handed_out(name: str, group: int, *, leader: bool) -> Iterator[int]:
    """Yield 0, 1, ..., each number to only one of the groups of ranks that ask for it: whoever is free takes the next one.

    Args:
        name: of what is handed out; used once in a job.
        group: number of the group that this rank belongs to. Its ranks get the same numbers.
        leader: whether this rank asks for the group.
    """
    store = dist.distributed_c10d._get_default_store()
    for turn in itertools.count():
        key = f"{name}/{group}/{turn}"
        if leader:
            number = store.add(f"{name}/next", 1) - 1
            store.set(key, str(number))
        else:
            number = int(store.get(key))
        yield number


def gather_objects(value: Any) -> list[Any]:
    """Return the objects of all ranks, by rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def reduce_over(groups: Iterable[ProcessGroup], values: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce values in place over groups, one after the other; over Mesh.all_ranks, no communicator of all ranks is needed."""
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(values, op, group=group)


def on_rank_0(call: Callable[[], Any]) -> Any:
    """Call a function on rank 0, and return its result on every rank. The only rank of a rehearsal calls it itself.

    Raises:
        UserError: the function raised it; on every rank, so that all of them end.
        ToBeContinued: likewise.
    """
    if rehearsed_group.is_initialized():
        return call()
    answer: list[Any] = [None, None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = call()
        except UserError as error:
            answer[1] = error.violations
        except ToBeContinued as stopped:
            answer[2] = stopped.code, stopped.reason
    dist.broadcast_object_list(answer)
    if answer[1]:
        raise UserError(answer[1])
    if answer[2]:
        raise ToBeContinued(*answer[2])
    return answer[0]


def backend_of_groups(device: torch.device) -> str | None:
    """The backend of the groups of the mesh: they reduce tensors on this device only, so that they need no other backend's connections.

    None, which is the backend of the default group, for the meta device of a dry run and in a rehearsal.
    """
    if rehearsed_group.is_initialized():
        return None
    return {"cuda": "nccl", "cpu": SERIAL_GLOO}.get(device.type)


def timeout_of_groups(minutes: float) -> timedelta:
    """Timeout of the collectives of a step: one minute after the watchdog (training.timeout_minutes), which names the rank waited for."""
    return timedelta(minutes=minutes + 1)


def build_mesh(layout: Layout, device: torch.device, minutes: float = MINUTES, node_ranks: int | None = None) -> Mesh:
    """Create this rank's process groups, at most eight, four more for parallel.zero_group and one for folded experts; connect their ranks.

    Args:
        device: of the tensors that the groups reduce.
        minutes: training.timeout_minutes.
        node_ranks: as in Mesh.
    """
    rank = dist.get_rank()
    assert dist.get_world_size() == layout.world_size, "the layout has another world size"
    ends = (layout.holder(0), layout.holder(layout.stage_count - 1))
    world = dist.group.WORLD
    assert world is not None
    axes = replace(layout, schedule="", stages_per_rank=1, micro_batches=1, blocks=())
    groups = dict(_groups(world, axes, rank, ends, device, minutes))
    tied_embedding = groups.pop("tied_embedding")
    at_an_end = layout.coordinates(rank).pipeline in ends and ends[0] != ends[1]
    return Mesh(layout, rank, device, **groups, tied_embedding=tied_embedding if at_an_end else None, node_ranks=node_ranks)


@cache
def _groups(
    world: ProcessGroup,  # noqa: ARG001 - of the cache
    layout: Layout,
    rank: int,
    ends: tuple[int, int],
    device: torch.device,
    minutes: float,
) -> dict[str, ProcessGroup]:
    """Create and connect the groups that contain a rank, by their name in Mesh; cached, since each costs threads and connections."""
    create = partial(dist.new_group, timeout=timeout_of_groups(minutes), backend=backend_of_groups(device))
    groups = _create_groups(layout, rank, ends, create)
    for group in dict.fromkeys(groups.values()):
        _connect(group, device)
    return groups


def _connect(group: ProcessGroup, device: torch.device) -> None:
    """Create the communicator of a group by a collective, which all its ranks enter.

    NCCL would create it at the first collective or, where the first operation is a mixed batch of sends and receives of the pipeline
    schedule, wait for ranks that have none.
    """
    if device.type != "meta" and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _create_groups(layout: Layout, rank: int, ends: tuple[int, int], create: Callable[..., ProcessGroup]) -> dict[str, ProcessGroup]:
    """Create the groups that contain a rank, by their name in Mesh.

    A rank creates only its own groups, so the time does not grow with the world size. All ranks create the same number of groups, because
    torch names such a group by its members and the number of groups created before. A group with the members of an existing one reuses it.
    This happens on all ranks or on none, except for the group of the first and last stage: the ranks between create a group of size one.
    """
    coordinates = layout.coordinates(rank)
    created: dict[tuple[int, ...], ProcessGroup] = {}

    def new(members: tuple[int, ...]) -> ProcessGroup:
        return create(list(members), use_local_synchronization=True)

    def group(**axes: Iterable[int]) -> ProcessGroup:
        """The ranks at all combinations of these indices, and at this rank's index on the other axes."""
        return of(tuple(layout.rank(replace(coordinates, **dict(zip(axes, indices, strict=True)))) for indices in product(*axes.values())))

    def of(members: tuple[int, ...]) -> ProcessGroup:
        """The group of these ranks, which include this one."""
        if members not in created:
            created[members] = new(members)
        return created[members]

    stages, experts, pieces = range(layout.pipeline), range(layout.expert), range(layout.tensor)
    named = {
        "tensor": group(tensor=pieces),
        "context": group(context=range(layout.context)),
        "expert": group(expert=experts),
        "data": group(data=range(layout.data), context=range(layout.context)),
        "dense": group(data=range(layout.data), expert=experts, context=range(layout.context)),
        "pipeline": group(pipeline=stages),
    }
    if layout.folded:
        named["tensor_expert"] = group(expert=experts, tensor=pieces)
    if layout.zero_block is not None:
        for name in ("dense", "data"):
            shards, replicas = layout.zero_members(coordinates, experts=name == "data")
            named |= {f"{name}_shards": of(shards), f"{name}_replicas": of(replicas)}
    if ends[0] == ends[1] or layout.pipeline == 2:
        return named | {"tied_embedding": named["pipeline"]}
    if coordinates.pipeline in ends:
        return named | {"tied_embedding": new(tuple(layout.rank(replace(coordinates, pipeline=end)) for end in ends))}
    return named | {"tied_embedding": new((rank,))}
