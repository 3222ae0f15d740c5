"""A process group of a job of which only one rank exists: collectives with the streams, events and lifetimes of NCCL's that send nothing.

On tensors of a GPU, a collective runs on a stream of the group, which first waits for the current stream; `wait` makes the current stream
wait for its end, and until then the tensors are kept, as ProcessGroupNCCL does (torch 2.8 and later). With async_op=False it runs on the
current stream. The contents of outputs are left as they are. On CPU tensors, outputs are as if every rank had the data of this one.
"""

# mypy: disable-error-code="override"
# torch calls the collectives with the arguments below; its stubs also declare forms that it does not use.
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from pipeline.parallel.rehearsed_contents import fill
from pipeline.parallel.rehearsed_store import CountingStore
from pipeline.parallel.rehearsed_work import RehearsedWork

#: Name of the backend.
BACKEND = "rehearsal"


@dataclass(frozen=True, slots=True)
class Call:
    """A collective or point-to-point operation, as this rank issued it.

    Attributes:
        name: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send, receive or barrier.
        ranks: global ranks of the group.
        size: bytes of the larger one of inputs and outputs on this rank.
        stream: handle of the CUDA stream that it runs on; None for CPU tensors.
        reads, writes: (begin, end) of the memory of inputs and outputs.
        peer: global rank that is sent to or received from; -1 for a collective.
    """

    name: str
    ranks: tuple[int, ...]
    size: int
    stream: int | None
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    peer: int = -1


Listener = Callable[[Call], None]

_listener: Listener | None = None
_store: CountingStore | None = None


def listen(listener: Listener | None) -> None:
    """Call a function with every collective from now on; None ends it."""
    global _listener
    _listener = listener


def initialize(rank: int, world_size: int) -> None:
    """Initialize the default process group of a job of which only this rank exists."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    global _store
    _store = CountingStore()
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=_store)


def store_requests() -> dict[str, int]:
    """Return request -> number of those that this rank has made to the rendezvous store."""
    return {} if _store is None else dict(_store.requests)


def is_initialized() -> bool:
    """Whether the default process group is one of these."""
    return dist.is_initialized() and isinstance(dist.group.WORLD, RehearsedGroup)


def without_shared_memory(group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """A context in which products fused with collectives of a group (parallel.async_tensor) run one after the other.

    The memory that their pieces travel through would be that of other ranks.
    """
    from torch.distributed import _symmetric_memory

    return _symmetric_memory._test_mode({group.group_name})


def _create(options: Any, _: Any) -> RehearsedGroup:
    """Create a group; called by torch."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return RehearsedGroup(options.group_rank, options.group_size, ranks, options.group_id)


class RehearsedGroup(dist.ProcessGroup):
    """The group of this rank and of others that do not exist.

    Args:
        rank: of this process in the group.
        ranks: their global ranks.
        name: unique name.
    """

    def __init__(self, rank: int, size: int, ranks: tuple[int, ...], name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the form for subclasses
        self._rank, self._size, self.ranks, self._name = rank, size, ranks, name
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._has_collectives = False

    def rank(self) -> int:
        """Rank of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def communicators(self) -> int:
        """Communicators of NCCL that the calls of this rank would have created: of the group, and of each pair of ranks."""
        return int(self._has_collectives) + len(self._streams.keys() - {-1})

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Name of the backend."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """Name by which functional collectives find the group."""
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices of tensors: objects are exchanged as tensors of the first one."""
        return [torch.device("cpu"), torch.device("cuda")]

    def _set_sequence_number_for_group(self) -> None:
        """There is no other rank to agree with."""

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002 - signature of ProcessGroup
        """The group is its own backend."""
        return self

    supports_splitting = False
    supports_coalescing = False

    def shutdown(self) -> None:
        """There is nothing to release."""

    def abort(self) -> None:
        """There is nothing to end."""

    # Collectives. torch calls these by name, also from functional collectives.

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work | None:
        """See torch.distributed.all_reduce."""
        return self._run("all_reduce", tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work | None:
        """See torch.distributed.all_reduce_coalesced."""
        return self._run("all_reduce", tensors, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work | None:
        """See torch.distributed.broadcast."""
        return self._run("broadcast", tensors, tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work | None:
        """See torch.distributed.reduce."""
        return self._run("reduce", tensors, tensors, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Work | None:
        """See torch.distributed.all_gather_into_tensor."""
        return self._run("all_gather", [tensor], [output], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Work | None:
        """Several all-gathers at once."""
        return self._run("all_gather", tensors, outputs, opts)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work | None:
        """See torch.distributed.all_gather. NCCL gathers into one buffer, from which the outputs are copied."""
        if not tensors[0].is_cuda:
            return self._run("all_gather", tensors, outputs[0], opts)
        flat = torch.empty((self._size, *tensors[0].shape), dtype=tensors[0].dtype, device=tensors[0].device)
        return self._run("all_gather", tensors, [flat], opts, then=lambda: [o.copy_(f) for o, f in zip(outputs[0], flat, strict=True)])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Work | None:
        """See torch.distributed.reduce_scatter_tensor."""
        return self._run("reduce_scatter", [tensor], [output], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Work | None:
        """Several reduce-scatters at once."""
        return self._run("reduce_scatter", tensors, outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> Work | None:
        """See torch.distributed.reduce_scatter. NCCL's inputs are copied to one buffer."""
        return self._run("reduce_scatter", [torch.stack(tensors[0])], outputs, opts)

    def all_to_all_single(self, output: Tensor, tensor: Tensor, output_splits: list[int], splits: list[int], opts: Any) -> Work | None:
        """See torch.distributed.all_to_all_single; empty splits are even."""
        return self._run("all_to_all", [tensor], [output], opts, splits=(list(splits), list(output_splits)))

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Work | None:
        """See torch.distributed.all_to_all."""
        return self._run("all_to_all", tensors, outputs, opts)

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work | None:
        """See torch.distributed.gather."""
        return self._run("gather", tensors, outputs[0] if outputs else [], opts)

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> Work | None:
        """See torch.distributed.scatter."""
        return self._run("scatter", tensors[0] if tensors else [], outputs, opts)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:  # noqa: ARG002 - signature of ProcessGroup
        """See torch.distributed.isend."""
        return self._point_to_point("send", tensors, [], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:  # noqa: ARG002 - signature of ProcessGroup
        """See torch.distributed.irecv."""
        return self._point_to_point("receive", [], tensors, peer)

    def barrier(self, opts: Any = None) -> Work:  # noqa: ARG002 - signature of ProcessGroup
        """All ranks are there."""
        self._tell("barrier", [], [], None)
        return RehearsedWork(None, [], [])

    def _run(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: Any,
        splits: tuple[list[int], list[int]] | None = None,
        then: Callable[[], object] | None = None,
    ) -> Work | None:
        """Run a collective, and what follows it on its stream."""
        if not any(tensor.is_cuda for tensor in (*inputs, *outputs)):
            self._tell(name, inputs, outputs, None)
            fill(name, inputs, outputs, self._rank, self._size, opts, splits)
            return RehearsedWork(None, [], outputs)
        self._has_collectives = True
        if not opts.asyncOp:
            # NCCL runs the operations of a communicator one after the other, on whatever stream (https://github.com/NVIDIA/nccl/issues/574).
            if stream := self._streams.get(-1):
                torch.cuda.current_stream().wait_stream(stream)
            self._tell(name, inputs, outputs, torch.cuda.current_stream())
            if stream:
                stream.wait_stream(torch.cuda.current_stream())
            if then is not None:
                then()
            return None
        return self._beside(name, inputs, outputs, -1, then)

    def _point_to_point(self, name: str, inputs: list[Tensor], outputs: list[Tensor], peer: int) -> Work:
        """Send or receive, on the stream of the pair: NCCL has a communicator of every pair."""
        if not any(tensor.is_cuda for tensor in (*inputs, *outputs)):
            self._tell(name, inputs, outputs, None, peer)
            for tensor in outputs:
                tensor.zero_()
            return RehearsedWork(None, [], outputs)
        return self._beside(name, inputs, outputs, peer)

    def _beside(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], peer: int, then: Callable[[], object] | None = None
    ) -> Work:
        """Run an operation on a stream of the group, which waits for the current stream."""
        if peer not in self._streams:
            self._streams[peer] = torch.cuda.Stream()
        stream = self._streams[peer]
        stream.wait_stream(torch.cuda.current_stream())
        self._tell(name, inputs, outputs, stream, peer)
        if then is not None:
            with torch.cuda.stream(stream):
                then()
        return RehearsedWork(stream.record_event(), (*inputs, *outputs), outputs)

    def _tell(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], stream: torch.cuda.Stream | None, peer: int = -1
    ) -> None:
        """Tell the listener."""
        if _listener is None:
            return
        size = max(sum(tensor.nbytes for tensor in tensors) for tensors in (inputs, outputs))
        handle = None if stream is None else stream.cuda_stream
        to = -1 if peer < 0 else self.ranks[peer]
        _listener(Call(name, self.ranks, size, handle, _memory(inputs), _memory(outputs), to))


def _memory(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """(begin, end) of the memory of each tensor, which is contiguous."""
    return tuple((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
