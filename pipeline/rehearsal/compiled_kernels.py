"""Kernels that Inductor generates: their work on a stream, and what the compiler says of them.

Inductor's code calls its kernels without PyTorch's dispatcher, so that no dispatch mode sees them. The memory that a kernel reads and
writes is that of its arguments, whose names in the generated code say which are written; its time is that of their bytes. Registers and
spills are those of the cubin, which ptxas wrote for the GPU of the job.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline.config.hardware import Hardware
from pipeline.planner import operator_kinds
from pipeline.planner.kernel_time import attention_time, elementwise_time
from pipeline.planner.operations import AttentionCall, Phase
from pipeline.rehearsal.operator_work import OperatorWork, access

#: Arguments of FlexAttention's kernels that they write, besides those that are called so; LSE is an argument of the backward pass.
RESULTS = frozenset({"arg_MAX", "arg_M", "arg_L", "arg_DQ", "arg_DV"})
#: Function that is told of a kernel before it is launched: (Inductor's object of it, its arguments).
Told = Callable[[Any, tuple[Any, ...]], None]


@dataclass(frozen=True)
class GeneratedKernel:
    """A generated kernel.

    Attributes:
        name: in the generated code.
        launches: in the observed step.
        registers: of a thread.
        spills: registers of a thread that are kept in local memory, 4 bytes each.
        shared: bytes of shared memory of a block of threads.
        warps: of a block of threads.
        bytes: that a launch reads and writes, mean of the launches.
    """

    name: str
    launches: int
    registers: int
    spills: int
    shared: int
    warps: int
    bytes: int


class SeenKernels:
    """The kernels of a step."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._launches: Counter[int] = Counter()
        self._bytes: Counter[int] = Counter()

    def launched(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        """A kernel is launched; see Told."""
        self._objects[id(kernel)] = kernel
        self._launches[id(kernel)] += 1
        self._bytes[id(kernel)] += sum(amount for _, amount, _, _ in _memory(kernel, arguments))

    def found(self) -> list[GeneratedKernel]:
        """Return them, those that move the most bytes first."""
        order = sorted(self._objects, key=lambda key: -self._bytes[key])
        return [_described(self._objects[key], self._launches[key], self._bytes[key] // self._launches[key]) for key in order]


@contextmanager
def launches_told(told: Told) -> Iterator[None]:
    """Tell a function of every launch of a generated kernel, if something was compiled before: the import of the compiler takes seconds."""
    heuristics = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if heuristics is None:
        yield
        return
    CachingAutotuner: Any = heuristics.CachingAutotuner  # noqa: N806 - a class
    run = CachingAutotuner.run

    def telling(self: Any, *arguments: Any, **named: Any) -> Any:
        """Tell, and launch."""
        if not named.get("benchmark_run"):
            told(self, arguments)
        return run(self, *arguments, **named)

    CachingAutotuner.run = telling
    try:
        yield
    finally:
        CachingAutotuner.run = run


def name_of(kernel: Any) -> str:
    """The name of a kernel in the generated code."""
    return str(kernel.inductor_meta.get("kernel_name") or kernel.fn.__name__)


def work_of(kernel: Any, arguments: tuple[Any, ...], hardware: Hardware) -> OperatorWork:
    """Return the work of a launch.

    Args:
        kernel: Inductor's object of it.
        arguments: of the launch: tensors and numbers, in the order of the signature.
    """
    memory = list(_memory(kernel, arguments))
    reads = tuple(filter(None, (access(tensor) for tensor, _, read, _ in memory if read)))
    writes = tuple(filter(None, (access(tensor) for tensor, _, _, written in memory if written)))
    named = dict(zip(_signature(kernel), arguments, strict=False))
    if {"arg_Q", "arg_K", "arg_V"} <= named.keys():  # FlexAttention; the values of its mask are not known: all pairs of a query and a key
        return OperatorWork("attention", attention_time(_attention(kernel, named), hardware), reads, writes)
    return OperatorWork("kernel", elementwise_time(sum(amount for _, amount, _, _ in memory), hardware), reads, writes)


def _attention(kernel: Any, named: dict[str, Any]) -> AttentionCall:
    """The call of a kernel of FlexAttention. Its arguments are buffers, whose shapes are not those of the queries, keys and values."""
    sizes, q, k = kernel.inductor_meta["config_args"], named["arg_Q"], named["arg_K"]
    # Of (batch, heads, queries); of a kernel for few queries, which divides the keys, of (batch, parts of the keys, heads, queries).
    statistics: Tensor = named["arg_LSE"] if "arg_LSE" in named else named["arg_M"]
    batch, heads, queries = (statistics.shape[dim] for dim in (0, -2, -1))
    kv_heads, width = heads // sizes["GQA_SHARED_HEADS"], sizes["QK_HEAD_DIM"]
    constant = re.search(r"\bKV_LEN = (\d+)", kernel.fn.src)
    keys = int(constant[1]) if constant else k.numel() // (batch * kv_heads * width)
    phase: Phase = "backward" if "arg_DO" in named else "forward"
    return AttentionCall(phase, batch, heads, kv_heads, queries, keys, width, sizes["V_HEAD_DIM"], 1.0, 1, q.element_size())


def _signature(kernel: Any) -> list[str]:
    """The names of the arguments."""
    return list(kernel.triton_meta["signature"])


def _memory(kernel: Any, arguments: tuple[Any, ...]) -> Iterator[tuple[Tensor, int, bool, bool]]:
    """Yield (tensor, bytes that are moved, whether it is read, whether it is written) of each argument that is a tensor.

    A kernel may use a part of a tensor: it moves at most an element for each of its indices.
    """
    named = list(zip(_signature(kernel), arguments, strict=False))
    changed = kernel.inductor_meta.get("mutated_arg_names", ())
    results = RESULTS if "arg_DO" in _signature(kernel) else RESULTS | {"arg_LSE"}
    elements = 1
    for name, value in named:
        if name.endswith("numel") and isinstance(value, int):
            elements *= value
    is_limited = "triton_per" not in name_of(kernel) and elements > 1  # the reduced dimension of these may be a constant
    for name, tensor in named:
        if isinstance(tensor, Tensor):
            inside, outside = name.startswith("in_out_ptr"), name.startswith("out_ptr") or name in results
            written = inside or outside or name in changed
            size = operator_kinds.moved(tensor)
            used = min(size, elements * tensor.element_size()) if is_limited else size
            yield tensor, used * (2 if inside else 1), not outside, written


def _described(kernel: Any, launches: int, moved: int) -> GeneratedKernel:
    """What the compiler says of a kernel."""
    (launcher, *_) = kernel.launchers
    registers, spills, shared = (int(getattr(launcher, name, None) or 0) for name in ("n_regs", "n_spills", "shared"))
    return GeneratedKernel(name_of(kernel), launches, registers, spills, shared, launcher.config.num_warps, moved)
