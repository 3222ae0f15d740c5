"""A dispatch mode that records the operations and allocations of a model on the meta device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pipeline.planner.operations import AttentionCall, Collective, Kind, Operation, Phase, Product

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default, _ATEN.mm.out, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default, _ATEN._grouped_mm.default}
_FLASH = _ATEN._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = _ATEN._scaled_dot_product_flash_attention_backward.default
_RING = torch.ops.pipeline.ring_attention.default
_RING_BACKWARD = torch.ops.pipeline.ring_attention_backward.default
_FUNCTIONAL: dict[str, Kind] = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
#: Operators that move no data, besides views.
_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "wait_tensor", "promote_types"}
#: Operators whose result shares the storage of their input; on the meta device it may have its own.
_ALIASES = {"_unsafe_view", "_reshape_alias", "wait_tensor"}
#: Operators that read only the selected rows of their first input.
_LOOKUPS = {"embedding", "index_select", "gather", "index"}


@dataclass
class Kernel:
    """A recorded call.

    Attributes:
        part: part of the model.
        phase: forward, backward or recompute.
        name: operator.
        operation: what it is; None for a memory-bound kernel.
        reads, writes: ids of storages -> bytes that are read or written.
    """

    part: str
    phase: Phase
    name: str
    operation: Operation | None
    reads: dict[int, int]
    writes: dict[int, int]


@dataclass
class Storage:
    """An allocation.

    Attributes:
        bytes: its size.
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
    """

    def __init__(self, weights: dict[Tensor, str], axes: dict[str, str], axis_sizes: dict[str, int]) -> None:
        super().__init__()
        self.recording = Recording()
        self.part, self.in_backward = "embed", False
        #: Share of the pairs and ring size of the attention calls, by the id of their logsumexp; `pairs` is that of the next call.
        self.pairs = 1.0
        self._calls: dict[int, AttentionCall] = {}
        self._axes, self._sizes = axes, axis_sizes
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
        short = operator.name().partition("::")[2].partition(".")[0]
        if short in _ALIASES and isinstance(result, Tensor):
            self._ids.setdefault(result.untyped_storage(), self._id(args[0]))
            return result
        if operator.is_view or short in _FREE:
            for tensor in _tensors(result):
                self._id(tensor)
            return result
        inputs = list(_tensors((args, kwargs)))
        reads = dict(_sizes(self, inputs))
        outputs = list(_tensors(result))
        writes = dict(_sizes(self, outputs))
        if short == "cat":
            self._name_concatenation(list(reads), outputs[0])
        if quantized := next((key for key in reads if key in self._quantized), None):
            self._name_dequantized(quantized, operator, outputs)
        if short in _LOOKUPS:
            reads[self._id(inputs[0])] = sum(writes.values())
        operation, name = self._operation(operator, args, inputs, outputs, kwargs), operator.name()
        index = len(self.recording.kernels)
        self.recording.kernels.append(Kernel(self.part, self.phase, name.removeprefix("aten::"), operation, reads, writes))
        for key in writes:
            if self.recording.storages[key].kernel is None and key not in reads:
                self.recording.storages[key].kernel = index
        return result

    def _name_concatenation(self, inputs: list[int], result: Tensor) -> None:
        """Name the concatenated weights of several layers, which one product applies."""
        names = [self._names[key].split(".") for key in inputs if key in self._names]
        if len(names) == len(inputs) and all(len(name) > 1 for name in names):
            layers = "+".join(name[-2] for name in names)
            self._names[self._id(result)] = ".".join([*names[0][:-2], layers, names[0][-1]])

    def _name_dequantized(self, codes: int, operator: Any, results: list[Tensor]) -> None:
        """Name what follows from the codes of a weight in 4 bits, up to the product that it is computed for."""
        if operator not in _PRODUCTS:
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
        if operator in _PRODUCTS:
            return self._product(operator, args)
        if operator in (_FLASH, _RING):
            call = self._attention(inputs[:3], operator is _RING, kwargs)
            self._calls[self._id(outputs[1])] = call
            return call
        if operator in (_FLASH_BACKWARD, _RING_BACKWARD):
            forward = self._calls[self._id(args[5])]
            return AttentionCall(**{**forward.__dict__, "phase": self.phase})
        name = operator.name().partition(".")[0]
        if name in _FUNCTIONAL:
            group = next(a for a in reversed(args) if isinstance(a, str) and a in self._axes)
            sizes = [t.numel() * t.element_size() for t in (*inputs, *outputs)]
            return Collective(_FUNCTIONAL[name], self._axes[group], self.phase, max(sizes))
        if name == "c10d::alltoall_base_":
            return Collective("all_to_all", "expert", self.phase, inputs[1].numel() * inputs[1].element_size())
        assert not name.startswith(("c10d", "_c10d")), f"the planner does not know the collective {name}"
        return None

    def _product(self, operator: Any, args: Any) -> Product:
        """A matrix product, with the weight's name."""
        first, second = (args[1], args[2]) if operator in (_ATEN.addmm.default, _ATEN.baddbmm.default) else (args[0], args[1])
        batch, m, k, n = 1, first.shape[-2], first.shape[-1], second.shape[-1]
        if operator is _ATEN._grouped_mm.default:
            batch = max(first.shape[0] if first.dim() == 3 else 1, second.shape[0] if second.dim() == 3 else 1)
            if first.dim() == second.dim() == 2:  # the gradient of the weights: the summed dimension is split
                offsets = args[2]
                batch = offsets.shape[0]
                k //= batch
            elif first.dim() == 2:
                m //= batch
            else:
                n //= batch
        elif first.dim() == 3:
            batch = first.shape[0]
        name = next((self._names[key] for key in (self._id(first), self._id(second)) if key in self._names), "")
        shape = (batch, *sorted((m, n, k)))
        if name and self.phase == "forward":
            self._pending.append((shape, name))
        elif not name:  # the gradient of a weight has the dimensions of its forward product
            forward = next((pair for pair in reversed(self._pending) if pair[0] == shape), None)
            if forward is not None and self.phase == "backward":
                self._pending.remove(forward)
                name = forward[1]
        return Product(name, self.phase, m, n, k, batch, first.element_size())

    def _attention(self, inputs: list[Tensor], ring: bool, kwargs: Any) -> AttentionCall:
        """A call of an attention kernel."""
        q, k, v = inputs
        ranks = self._sizes["context"] if ring else 1
        if ring:
            self.pairs = visible_share(q.shape[2] * ranks, k.shape[2] * ranks, causal=kwargs["causal"], window=kwargs["window"])
        (batch, heads, queries, head_dim), keys, value_dim = q.shape, k.shape[2], v.shape[3]
        size = q.element_size()
        return AttentionCall(self.phase, batch, heads, k.shape[1], queries, keys, head_dim, value_dim, self.pairs, ranks, size)


def visible_share(queries: int, keys: int, *, causal: bool, window: int | None) -> float:
    """Return the share of all (query, key) pairs that a causal mask and a window leave."""
    if window is not None and window < keys:
        return window / keys if causal else min(1.0, 2 * window / keys)
    return 0.5 * (1 + 1 / max(1, queries)) if causal else 1.0


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _sizes(recorder: Recorder, tensors: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Storage ids, each with the bytes of the tensor that a kernel reads or writes; an expanded tensor counts once."""
    for tensor in tensors:
        elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        yield recorder._id(tensor), elements * tensor.element_size()
