"""Records a step of this process on a CUDA device: operators, collectives, events, waits and allocations in the order of the host.

Operators are seen by a dispatch mode, in autograd's threads too; events, waits of the host and the caching allocator by PyTorch's trace of
its CUDA calls, which its stream sanitizer uses; collectives by the listener of the process group. A dispatch mode sees nothing of
compiled kernels, which are seen where Inductor's code launches them (compiled_kernels.py). Nothing is compiled while it records.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._prims.rng_prims import graphsafe_run_with_rng_state
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.hardware import Hardware
from pipeline.parallel.rehearsed_group import Call
from pipeline.planner.communication import Group, collective_time
from pipeline.planner.operations import Kind
from pipeline.rehearsal import compiled_kernels, flex_attention, fused_products
from pipeline.rehearsal.early_stop import EarlyStop, without_exceptions
from pipeline.rehearsal.operator_work import OperatorWork, accesses, work_of
from pipeline.rehearsal.record import Allocate, Entry, EventRecord, Free, HostWait, Mark, RecordStream, StreamWait, Work
from pipeline.rehearsal.source_lines import PACKAGE, SourceLines

#: Allocations and frees of a step that are kept with their sizes.
MOST_ALLOCATIONS = 1 << 22
#: Which collective of the planner has the time of one of the group.
_TIMED_AS: dict[str, Kind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "all_gather",
    "reduce": "reduce_scatter",
    "gather": "all_gather",
    "scatter": "reduce_scatter",
    "send": "send",
    "receive": "send",
}
_RECORD_STREAM = torch.ops.aten.record_stream.default
#: Operators without a kernel of their own, which fused products call.
_COMPOSITE = (torch.ops.aten.matmul.default, torch.ops.aten.flatten.using_ints, torch.ops.aten.reshape.default)
_FUNCTIONAL_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


class OperationRecorder(TorchDispatchMode):
    """What `recorded` records.

    Args:
        hardware: the GPU, whose times the work gets.
        axes: global ranks of a group -> mesh axis.
        folder: whose lines of code are recorded.
        stop: whether a recomputation is past its end: what still runs is not recorded, but for its memory.
    """

    supports_higher_order_operators = True

    def __init__(self, hardware: Hardware, axes: Mapping[tuple[int, ...], str], folder: Path, stop: EarlyStop) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self._hardware, self._axes, self._stop = hardware, axes, stop
        self._lines = SourceLines(folder)
        self._started, self._spent = time.process_time(), 0.0
        self._device = torch.cuda.current_device()

    def mark(self, name: str) -> None:
        """A part of the step begins."""
        self.entries.append(Mark(self._now(), name))

    def collective(self, call: Call) -> None:
        """A collective was queued; the listener of the process group."""
        if call.stream is None or self._stop.is_past:
            return
        began = time.process_time()
        now, seconds = self._now(), self._seconds(call)
        reads, writes = (tuple(accesses(ranges)) for ranges in (call.reads, call.writes))
        axis, site = self._axes.get(call.ranks, "world"), self._lines.here()
        self.entries.append(Work(now, "collective", call.name, call.stream, site, seconds, 1, reads, writes, axis, call.size))
        self._spent += time.process_time() - began

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record its work."""
        kwargs = dict(kwargs or {})
        if operator is _RECORD_STREAM:
            self._record_stream(*args)
            return operator(*args, **kwargs)
        if operator is graphsafe_run_with_rng_state:  # compiled code calls an operator that it computes again; values mean nothing here
            kwargs.pop("rng_state")
            with self:
                return args[0](*args[1:], **kwargs)
        if operator in _COMPOSITE:  # called below autograd, which has not taken it apart: a flatten may copy
            with self:
                return operator.decompose(*args, **kwargs)
        place, before = len(self.entries), self._now()
        if (namespace := getattr(operator, "namespace", "")) in ("pipeline", fused_products.NAMESPACE):
            with self:  # the kernel of such an operator calls others: they are recorded
                result = operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)
            if namespace == fused_products.NAMESPACE:
                self._overlap(operator, args, place)
            return result
        result = flex_attention.run(operator, args) if isinstance(operator, HigherOrderOperator) else operator(*args, **kwargs)
        began = time.process_time()
        if not self._stop.is_past:
            self._operator(operator, args, kwargs, result, place, before)
        self._spent += time.process_time() - began
        return result

    def compiled(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        """A kernel of compiled code is launched; see compiled_kernels.Told."""
        if self._stop.is_past:
            return
        began = time.process_time()
        work, stream = compiled_kernels.work_of(kernel, arguments, self._hardware), torch._C._cuda_getCurrentRawStream(self._device)
        name, site = compiled_kernels.name_of(kernel), self._lines.here(in_function=True)
        self.entries.append(Work(self._now(), work.kind, name, stream, site, work.seconds, 1, work.reads, work.writes))
        self._spent += time.process_time() - began

    def _overlap(self, operator: Any, args: Any, place: int) -> None:
        """Record the parts of a fused product as they run on GPUs."""
        names = [argument.name for argument in operator._schema.arguments]
        if "group_name" in names[: len(args)]:
            ranks = fused_products.ranks_of(args[names.index("group_name")])
            self.entries[place:] = fused_products.overlapped(self.entries[place:], ranks, self._hardware)

    def _operator(self, operator: Any, args: Any, kwargs: Any, result: Any, place: int, before: float) -> None:
        """Record the work of an operator: after what it allocated, and before what it waited for or sent."""
        name = operator.name()
        if name.startswith(("c10d", "_c10d")) and operator is not _FUNCTIONAL_ALL_REDUCE:
            return
        if operator is _FUNCTIONAL_ALL_REDUCE:  # reduces a copy of its argument
            operator, kwargs = torch.ops.aten.clone.default, {}
            args = args[:1]
        if isinstance(operator, HigherOrderOperator):
            work: OperatorWork | None = flex_attention.work(operator, args, result, self._hardware)
        else:
            work = work_of(operator, args, kwargs, result, self._hardware)
        if work is None:
            return
        site, stream = self._lines.here(), torch._C._cuda_getCurrentRawStream(self._device)
        entry = Work(before, work.kind, name, stream, site, work.seconds, 1, work.reads, work.writes, "", work.size)
        while place < len(self.entries) and isinstance(self.entries[place], Allocate | Free):
            place += 1
        self.entries.insert(place, entry)

    def _record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tensor.record_stream."""
        handle = torch.cuda.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type).cuda_stream
        self.entries.append(RecordStream(self._now(), tensor.untyped_storage().data_ptr(), handle, self._lines.here()))

    def _seconds(self, call: Call) -> float:
        """Time of a collective, as planned."""
        if call.name not in _TIMED_AS:
            return 0.0
        ranks = call.ranks if call.peer < 0 else (call.peer, torch.distributed.get_rank())
        nodes = [rank // self._hardware.gpus_per_node for rank in ranks]
        where = Group(len(ranks), max(nodes.count(node) for node in set(nodes)))
        return collective_time(_TIMED_AS[call.name], call.size, where, self._hardware)

    def _now(self) -> float:
        """CPU seconds of the process since the begin of the record, without those of recording: others may slow the machine down."""
        return time.process_time() - self._started - self._spent

    # Calls of CUDA, as PyTorch's trace tells of them.

    def event_recorded(self, event: int, stream: int) -> None:
        """An event was recorded."""
        if not self._stop.is_past:
            self.entries.append(EventRecord(self._now(), event, stream, self._lines.here()))

    def event_waited(self, event: int, stream: int) -> None:
        """A stream waits for an event."""
        if not self._stop.is_past:
            self.entries.append(StreamWait(self._now(), event, stream, self._lines.here()))

    def device_waited(self) -> None:
        """The host waits for the device."""
        self.entries.append(HostWait(self._now(), "device", self._lines.here()))

    def stream_waited(self, stream: int) -> None:
        """The host waits for a stream."""
        self.entries.append(HostWait(self._now(), "stream", self._lines.here(), stream=stream))

    def event_waited_by_host(self, event: int) -> None:
        """The host waits for an event."""
        self.entries.append(HostWait(self._now(), "event", self._lines.here(), event=event))

    def allocated(self, address: int) -> None:
        """The caching allocator handed out memory, whose size `recorded` adds."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self.entries.append(Allocate(self._now(), address, 0, stream, self._lines.here()))

    def freed(self, address: int) -> None:
        """Memory went back to the caching allocator."""
        self.entries.append(Free(self._now(), address, self._lines.here()))


class _Trace:
    """PyTorch's trace of its CUDA calls; its callbacks stay registered, and tell the active recorder."""

    def __init__(self) -> None:
        self.active: OperationRecorder | None = None
        self.stop = EarlyStop()
        self._registered = False

    def register(self) -> None:
        """Register the callbacks."""
        if self._registered:
            return
        self._registered = True
        torch._C._activate_gpu_trace()
        self.stop = without_exceptions()
        _gpu_trace.register_callback_for_event_record(self._tell(OperationRecorder.event_recorded))
        _gpu_trace.register_callback_for_event_wait(self._tell(OperationRecorder.event_waited))
        _gpu_trace.register_callback_for_memory_allocation(self._tell(OperationRecorder.allocated))
        _gpu_trace.register_callback_for_memory_deallocation(self._tell(OperationRecorder.freed))
        _gpu_trace.register_callback_for_device_synchronization(self._tell(OperationRecorder.device_waited))
        _gpu_trace.register_callback_for_stream_synchronization(self._tell(OperationRecorder.stream_waited))
        _gpu_trace.register_callback_for_event_synchronization(self._tell(OperationRecorder.event_waited_by_host))

    def _tell(self, method: Callable[..., None]) -> Callable[..., None]:
        """A callback that calls a method of the active recorder."""

        def callback(*arguments: int) -> None:
            if self.active is not None:
                method(self.active, *arguments)

        return callback


_TRACE = _Trace()


@contextmanager
def recorded(hardware: Hardware, axes: Mapping[tuple[int, ...], str], folder: Path = PACKAGE) -> Iterator[OperationRecorder]:
    """Record what this process does on its CUDA device until the end of the context; collectives by `OperationRecorder.collective`.

    Args:
        hardware: the GPU, whose times the work gets.
        axes: global ranks of a group -> mesh axis.
        folder: whose lines of code are recorded.
    """
    _TRACE.register()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=MOST_ALLOCATIONS)
    recorder = OperationRecorder(hardware, axes, folder, _TRACE.stop)
    recorder.entries += _allocated_earlier()
    _TRACE.active = recorder
    try:
        # A dispatch mode changes the dispatch keys, which are guarded: compiled code is taken by the guards that tell its versions apart.
        compiled = torch.compiler.set_stance("eager_on_recompile", skip_guard_eval_unsafe=True)
        with compiled, compiled_kernels.launches_told(recorder.compiled), recorder:
            yield recorder
    finally:
        _TRACE.active = None
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(None)
    recorder.entries = _with_sizes(recorder.entries, history)


def _allocated_earlier() -> list[Entry]:
    """The memory of the tensors that exist."""
    return [
        Allocate(0.0, block["address"], block["size"], segment["stream"], "", earlier=True)
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


def _with_sizes(entries: list[Entry], history: list[dict[str, Any]]) -> list[Entry]:
    """Add the sizes of allocations, which have the same order at each address."""
    sizes: defaultdict[int, deque[int]] = defaultdict(deque)
    for event in history:
        if event["action"] == "alloc":
            sizes[event["addr"]].append(event["size"])
    return [
        replace(entry, size=sizes[entry.address].popleft())
        if isinstance(entry, Allocate) and not entry.earlier and sizes[entry.address]
        else entry
        for entry in entries
    ]
