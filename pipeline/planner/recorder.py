"""A dispatch mode that records the operations and allocations of a model on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from pipeline.layers.uncompiled import Calls
from pipeline.parallel import ring_attention  # noqa: F401 - registers its operator
from pipeline.planner import operator_kinds
from pipeline.planner.operations import AttentionCall, Collective, Kind, Operation, Phase, Product, RingRules

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_RING = torch.ops.pipeline.ring_attention.default
_RING_BACKWARD = torch.ops.pipeline.ring_attention_backward.default
_FUNCTIONAL: dict[str, Kind] = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
#: What computes the 8-bit version of a weight of experts, which keeps its name.
_CASTS = {"mul", "_to_copy", "clone"}


@dataclass
class Kernel:
    """A recorded call.

    Attributes:
        phase: forward, backward or recompute.
        operation: what it is; None for a memory-bound kernel.
        reads, writes: ids of storages -> bytes that are read or written.
        graph: number of the graph of its part that it is compiled in, None for what is not compiled if the blocks are.
    """

    part: str
    phase: Phase
    name: str
    operation: Operation | None
    reads: dict[int, int]
    writes: dict[int, int]
    graph: int | None = 0


@dataclass
class Storage:
    """An allocation.

    Attributes:
        part, phase: in which it was made; an empty part for weights and inputs.
        kernel: the kernel that wrote it first, None for weights and inputs.
        born, died: number of kernels before it was allocated and freed; None if it was not freed.
    """

    bytes: int
    part: str
    phase: Phase
    kernel: int | None
    born: int
    died: int | None = None


@dataclass
class Recording:
    """Everything that was recorded: kernels in order, and storages by id."""

    kernels: list[Kernel] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records while it is active; the caller sets `part` and `phase`.

    Args:
        weights: weight -> name; an empty name for constants.
        axes: name of a process group -> mesh axis.
        axis_sizes: mesh axis -> ranks.
        eager: parts that are not compiled; None takes all for compiled, and as one graph each.
    """

    def __init__(
        self,
        weights: dict[Tensor, str],
        axes: dict[str, str],
        axis_sizes: dict[str, int],
        eager: Collection[str] | None = None,
        filled: float = 1.0,
    ) -> None:
        super().__init__()
        self.recording = Recording()
        self.part, self.in_backward = "embed", False
        #: Of functions that are not compiled; the caller notes them.
        self.calls, self._eager = Calls(), eager
        #: Share of the pairs and ring size of the attention calls, by the id of their logsumexp; `pairs` is that of the next call.
        self.pairs = 1.0
        self._calls: dict[int, AttentionCall] = {}
        self._axes, self._sizes, self._filled = axes, axis_sizes, filled
        self._ids: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._names: dict[int, str] = {}
        self._quantized: set[int] = set()
        self._count = 0
        self._pending: list[tuple[tuple[int, ...], str]] = []
        for weight, name in weights.items():
            key = self._id(weight, allocated=False)
            if name:
                self._names[key] = name
                if weight.dtype == torch.uint8:
                    self._quantized.add(key)

    @property
    def phase(self) -> Phase:
        """Of the next kernel: a backward pass recomputes with autograd on. Inside autograd functions, recomputation counts as backward."""
        if not self.in_backward:
            return "forward"
        return "recompute" if torch.is_grad_enabled() else "backward"

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on the meta device and record it."""
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        short = operator_kinds.short_name(operator)
        if short in operator_kinds.ALIASES and isinstance(result, Tensor):
            self._ids.setdefault(result.untyped_storage(), self._id(args[0]))
            return result
        if operator_kinds.is_free(operator):
            for tensor in operator_kinds.tensors(result):
                self._id(tensor)
            return result
        inputs = list(operator_kinds.tensors((args, kwargs)))
        reads = dict(_sizes(self, inputs))
        outputs = list(operator_kinds.tensors(result))
        writes = dict(_sizes(self, outputs))
        if short == "cat":
            self._name_concatenation(list(reads), outputs[0])
        if short in _CASTS and inputs[0].dim() == 3 and (cast := self._names.get(self._id(inputs[0]))):
            self._names[self._id(outputs[0])] = cast
        if quantized := next((key for key in reads if key in self._quantized), None):
            self._name_dequantized(quantized, operator, outputs)
        if short in operator_kinds.LOOKUPS:
            reads[self._id(inputs[0])] = sum(writes.values())
        operation, name = self._operation(operator, args, inputs, outputs, kwargs), operator.name()
        index = len(self.recording.kernels)
        self.recording.kernels.append(Kernel(self.part, self.phase, name.removeprefix("aten::"), operation, reads, writes, self._graph()))
        for key in writes:
            if self.recording.storages[key].kernel is None and key not in reads:
                self.recording.storages[key].kernel = index
        return result

    def _graph(self) -> int | None:
        """The graph of the next kernel: that of the operation whose backward pass it is, or that of the forward pass."""
        if self._eager is None:
            return 0
        if self.part in self._eager:
            return None
        node = torch._C._current_autograd_node() if self.phase == "backward" else None
        return self.calls.graph(None if node is None else node._sequence_nr())

    def _name_concatenation(self, inputs: list[int], result: Tensor) -> None:
        """Name the concatenated weights of several layers, which one product applies."""
        names = [self._names[key].split(".") for key in inputs if key in self._names]
        if len(names) == len(inputs) and all(len(name) > 1 for name in names):
            layers = "+".join(name[-2] for name in names)
            self._names[self._id(result)] = ".".join([*names[0][:-2], layers, names[0][-1]])

    def _name_dequantized(self, codes: int, operator: Any, results: list[Tensor]) -> None:
        """Name what follows from the codes of a weight in 4 bits, up to the product that it is computed for."""
        if operator not in operator_kinds.PRODUCTS:
            for result in results:
                self._quantized.add(key := self._id(result))
                self._names[key] = self._names[codes]

    def _id(self, tensor: Tensor, *, allocated: bool = True) -> int:
        """The id of a tensor's storage; a new one counts as allocated."""
        storage = tensor.untyped_storage()
        if storage not in self._ids:
            self._count += 1
            key = self._count
            self._ids[storage] = key
            part = self.part if allocated else ""
            made = Storage(storage.nbytes(), part, self.phase, None, len(self.recording.kernels))
            self.recording.storages[key] = made
            if allocated:
                finalize(storage, self._freed, made)
        return int(self._ids[storage])

    def _freed(self, storage: Storage) -> None:
        storage.died = len(self.recording.kernels)

    def _operation(self, operator: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor], kwargs: Any) -> Operation | None:
        """What a call is, None for a memory-bound kernel."""
        if operator in operator_kinds.PRODUCTS:
            return self._named(operator_kinds.product(operator, args, self.phase, self._filled), operator, args)
        if operator in (_FLASH, _RING):
            call = self._attention(inputs[:3], args[3:8] if operator is _RING else None, kwargs)
            self._calls[self._id(outputs[1])] = call
            return call
        if operator in (_FLASH_BACKWARD, _RING_BACKWARD):
            return replace(self._calls[self._id(args[5])], phase=self.phase)
        name = operator.name().partition(".")[0]
        if name in _FUNCTIONAL:
            group = next(a for a in reversed(args) if isinstance(a, str) and a in self._axes)
            sizes = [t.numel() * t.element_size() for t in (*inputs, *outputs)]
            return Collective(_FUNCTIONAL[name], self._axes[group], self.phase, max(sizes))
        if name == "c10d::alltoall_base_":
            axis = "expert" if self._sizes["expert"] > 1 else "tensor"  # whole experts on the tensor ranks
            return Collective("all_to_all", axis, self.phase, inputs[1].numel() * inputs[1].element_size())
        assert not name.startswith(("c10d", "_c10d")), f"the planner does not know the collective {name}"
        return None

    def _named(self, product: Product, operator: Any, args: Any) -> Product:
        """A matrix product with the weight's name."""
        name = next((self._names[key] for key in map(self._id, operator_kinds.operands(operator, args)) if key in self._names), "")
        shape = (product.batch, *sorted((product.m, product.n, product.k)))
        if name and self.phase == "forward":
            self._pending.append((shape, name))
        elif not name:  # the gradient of a weight has the dimensions of its forward product
            forward = next((pair for pair in reversed(self._pending) if pair[0] == shape), None)
            if forward is not None and self.phase == "backward":
                self._pending.remove(forward)
                name = forward[1]
        return replace(product, name=name)

    def _attention(self, inputs: list[Tensor], ring: Any, kwargs: Any) -> AttentionCall:
        """A call of an attention kernel; `ring` are the documents, limits, slopes, prefix and sinks of ring attention, None for others."""
        if ring is None:
            return operator_kinds.attention(inputs[0], inputs[1], inputs[2], self.phase, self.pairs)
        ranks, (documents, _, slopes, _, _), window = self._sizes["context"], ring, kwargs["window"]
        queries, keys = (tensor.shape[2] * ranks for tensor in inputs[:2])
        self.pairs = operator_kinds.visible_share(queries, keys, causal=kwargs["causal"], window=window)
        call = operator_kinds.attention(inputs[0], inputs[1], inputs[2], self.phase, self.pairs, ranks)
        return replace(call, rules=RingRules(kwargs["causal"], documents is not None, slopes is not None, window, kwargs["softcap"]))


def _sizes(recorder: Recorder, tensors: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Storage ids, each with the bytes of the tensor that a kernel reads or writes."""
    for tensor in tensors:
        yield recorder._id(tensor), operator_kinds.moved(tensor)
