"""What an operator of PyTorch puts on a stream: its kind, its time on the GPU as planned, and the memory that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pipeline.config.hardware import Hardware
from pipeline.layers.row_counts import VALUES
from pipeline.planner import operator_kinds
from pipeline.planner.kernel_time import attention_time, elementwise_time, product_time
from pipeline.planner.operations import AttentionCall
from pipeline.rehearsal.record import Access, WorkKind

#: Bytes per second of a copy between host and device: PCIe 5 x16, or 4 at its peak.
HOST_COPY = 25e9
#: Operators in place that do not read what they write.
_OVERWRITING = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "_foreach_copy_",
    "_foreach_zero_",
}
#: Operators that copy between host and device if only one of their tensors is on the device.
_COPIES = {"copy_", "_to_copy", "_local_scalar_dense"}
_FILLS = {"fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_full", "_foreach_zero_"}


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """Work of an operator; attributes as in record.Work."""

    kind: WorkKind
    seconds: float
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    size: int = 0


@cache
def _signature(operator: Any) -> tuple[tuple[tuple[str, bool], ...], bool]:
    """(name, whether it is written) of each argument, and whether what is written is not read."""
    arguments = operator._schema.arguments
    written = tuple((argument.name, argument.alias_info is not None and argument.alias_info.is_write) for argument in arguments)
    outputs_alone = all(argument.kwarg_only for argument, (_, is_written) in zip(arguments, written, strict=True) if is_written)
    return written, outputs_alone or operator_kinds.short_name(operator) in _OVERWRITING


def work_of(operator: Any, args: Any, kwargs: Any, result: Any, hardware: Hardware) -> OperatorWork | None:
    """Return the work of a call, None if it has none on a GPU.

    Args:
        operator: what was called.
        args, kwargs: its arguments.
        result: what it returned.
    """
    if operator_kinds.is_free(operator) or operator_kinds.short_name(operator) in operator_kinds.ALIASES:
        return None
    written, overwrites = _signature(operator)
    inputs: list[Tensor] = []
    changed: list[Tensor] = []
    values = (*args, *(kwargs.get(name) for name, _ in written[len(args) :]))
    for (_, is_written), value in zip(written, values, strict=True):
        tensors = list(operator_kinds.tensors(value)) if value is not None else []
        if is_written:
            changed += tensors
        if not (is_written and overwrites):
            inputs += tensors
    made = [tensor for tensor in operator_kinds.tensors(result) if not any(tensor is other for other in changed)]
    on_device = [[tensor for tensor in some if tensor.is_cuda and not isinstance(tensor, FakeTensor)] for some in (inputs, changed + made)]
    if not any(on_device):
        return None
    short = operator_kinds.short_name(operator)
    reads, writes = (tuple(filter(None, map(access, some))) for some in on_device)
    moved_in, moved_out = (sum(map(operator_kinds.moved, some)) for some in on_device)
    if short in _COPIES and not all(on_device):
        size = max(moved_in, moved_out)
        return OperatorWork("copy", size / HOST_COPY + hardware.kernel_us * 1e-6, reads, writes, size)
    if operator in operator_kinds.PRODUCTS:
        product = operator_kinds.product(operator, args, "forward", VALUES.filled)
        return OperatorWork("product", product_time(product, hardware)[0], reads, writes)
    if (call := _attention(operator, written, args, kwargs)) is not None:
        return OperatorWork("attention", attention_time(call, hardware), reads, writes)
    if short in operator_kinds.LOOKUPS:
        moved_in = 2 * moved_out
    kind: WorkKind = "fill" if short in _FILLS else "kernel"
    return OperatorWork(kind, elementwise_time(moved_in + moved_out, hardware), reads, writes)


def access(tensor: Tensor) -> Access | None:
    """Return the memory from the first to the last element of a tensor, None if it has none."""
    if tensor.numel() == 0 or not (begin := tensor.data_ptr()):
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Access(begin, begin + (last + 1) * tensor.element_size())


def _attention(operator: Any, written: tuple[tuple[str, bool], ...], args: Any, kwargs: Any) -> AttentionCall | None:
    """A call of a fused attention kernel, None for another operator."""
    short = operator_kinds.short_name(operator)
    if "attention" not in short:
        return None
    named = dict(zip((name for name, _ in written), args, strict=False)) | kwargs
    try:
        q, k, v = (named[name] for name in ("query", "key", "value"))
    except KeyError:
        return None
    if not short.startswith("_scaled_dot_product"):  # (batch, positions, heads, width), or without the batch
        q, k, v = ((tensor if tensor.dim() == 4 else tensor[None]).transpose(1, 2) for tensor in (q, k, v))
    causal = bool(named.get("is_causal", named.get("causal", False)))
    pairs = operator_kinds.visible_share(q.shape[2], k.shape[2], causal=causal, window=None)
    return operator_kinds.attention(q, k, v, "backward" if "backward" in short else "forward", pairs)


def accesses(ranges: tuple[tuple[int, int], ...]) -> Iterator[Access]:
    """Yield ranges of memory that are not empty."""
    return (Access(begin, end) for begin, end in ranges if end > begin)
