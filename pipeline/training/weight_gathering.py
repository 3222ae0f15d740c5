"""Gathers the weights of a bucket from their partitions before they are used.

Under ZeRO 1 and 2, the new weights are gathered once a step: the collectives start after the optimizer step, in the order of use, and every
module waits for its own. Under ZeRO 3, the matrices of a block are gathered for each use and freed after it; the gathering of the next
block starts before the computation of this one. The head, whose backward pass follows its forward pass, is gathered once for both, and
token embeddings only for the forward pass. Frozen matrices are gathered alike; no gradient tells that the backward pass of their module has
ended, so they are freed when that of the module before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeline.parallel.tensor_parallel import VocabParallelEmbedding
from pipeline.training.buckets import Bucket


class FlatWeights:
    """The weights of a bucket; the parameters are views of `flat`.

    Args:
        flat: (elements,), the whole weights; its storage is empty while they are freed.
        partition: (partition_elements,), this rank's weights: a view of `flat` if that is never freed, else the fp32 master weights,
            which are rounded for every gathering, or the rounded weights if the master weights are in host memory or others.
        freed: whether `flat` is freed after each use.
        trained: whether the weights have gradients, and change.
    """

    def __init__(self, bucket: Bucket, flat: Tensor, partition: Tensor, *, freed: bool, trained: bool = True) -> None:
        # .data: autograd must not take the gathering for a change of the weights that it has saved.
        self.bucket, self.flat, self.partition = bucket, flat.data, partition.data
        self.freed, self.trained = freed, trained
        self._bytes = flat.untyped_storage().nbytes()
        self._present, self._uses = True, 0
        self._work: Any = None
        self._sent: Tensor | None = None

    def start(self) -> None:
        """Start to gather freed weights."""
        if not self._present:
            self.flat.untyped_storage().resize_(self._bytes)
            self.refresh()
            self._present = True

    def refresh(self) -> None:
        """Start to gather the partitions, which have changed."""
        if self.bucket.ranks > 1:
            self._sent = self.partition.to(self.flat.dtype)  # kept until the end of the collective
            self._work = dist.all_gather_into_tensor(self.flat, self._sent, group=self.bucket.group, async_op=True)

    def refresh_present(self) -> None:
        """Start to gather the partitions, unless that is done before the next use."""
        if self._present:
            self.refresh()

    def wait(self) -> None:
        """Wait for the gathering (on a GPU, the current stream waits)."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None

    def acquire(self) -> None:
        """Make the weights available, until `release`."""
        self.start()
        self._uses += 1
        self.wait()

    def release(self) -> None:
        """End a use."""
        self._uses -= 1
        if self._uses == 0:
            self.free()

    def free(self) -> None:
        """Free the weights, unless they are kept."""
        self._uses = 0
        if self.freed and self._present:
            self.wait()
            self.flat.untyped_storage().resize_(0)
            self._present = False


class WeightGatherer:
    """Makes the weights of the blocks and of the other modules of every stage available when they are used.

    Args:
        stages: stage index (as str) -> module, as in LocalModel.stages.
    """

    def __init__(self, weights: Iterable[FlatWeights], stages: nn.ModuleDict) -> None:
        self._weights = list(weights)
        self._of = {parameter: flat for flat in self._weights for parameter in flat.bucket.pieces}
        self._in_backward: dict[Bucket, FlatWeights] = {}
        used: list[FlatWeights] = []
        for stage in stages.values() if any(flat.bucket.ranks > 1 for flat in self._weights) else ():
            used += self._register(_units(stage), getattr(stage, "head", None), receives=getattr(stage, "embed", None) is None)
        # The collectives run one after another: a gathering that is needed first must not be behind others.
        self._weights = list(dict.fromkeys([*used, *self._weights]))

    @property
    def order(self) -> list[FlatWeights]:
        """All weights, in the order of their first use."""
        return self._weights

    def refresh(self) -> None:
        """Start to gather weights that are not freed after use: the optimizer has changed them."""
        for flat in self._weights:
            if flat.trained:
                flat.refresh_present()

    def wait(self) -> None:
        """Wait for the gatherings in flight (on a GPU, the current stream waits), whose partitions may be overwritten then."""
        for flat in self._weights:
            flat.wait()

    def backward_finished(self, bucket: Bucket) -> None:
        """All gradients of a bucket have been computed in a backward pass."""
        if bucket in self._in_backward:
            self._in_backward.pop(bucket).release()

    def finish(self) -> None:
        """End all uses; weights without a gradient are still gathered then."""
        self._in_backward.clear()
        for flat in self._weights:
            flat.free()

    def _register(self, units: list[nn.Module], head: nn.Module | None, *, receives: bool) -> list[FlatWeights]:
        """Surround the calls of the modules of a stage. Returns their weights in the order of use.

        Args:
            units: its modules, in the order of use.
            receives: whether its input is that of another stage, to which it returns a gradient.
        """
        trained = (index for index, unit in enumerate(units) if any(parameter.requires_grad for parameter in unit.parameters()))
        first = 0 if receives else next(trained, len(units))  # the modules before it have no backward pass
        forward = [self._weights_of(unit.parameters()) for unit in units]
        backward = [self._weights_of(_read_in_backward(unit)) for unit in units]
        for index, unit in enumerate(units):
            following = _first_freed(forward[index + 1 :])
            preceding = _first_freed(reversed(backward[first:index]))
            others = [flat for weights in forward for flat in weights if not flat.trained and flat not in backward[index]]
            # Around the compiled call: torch.compile would trace hooks of the module, and break its graph there.
            call = unit._compiled_call_impl or unit._call_impl
            use = partial(self._call, call, forward[index], following, kept=backward[index] if unit is head else [])
            unit._compiled_call_impl = partial(self._with_hook, use, partial(self._before_backward, backward[index], preceding, others))
        return [flat for weights in forward for flat in weights]

    def _weights_of(self, parameters: Iterable[nn.Parameter]) -> list[FlatWeights]:
        return list(dict.fromkeys(self._of[parameter] for parameter in parameters if parameter in self._of))

    def _call(
        self,
        call: Callable[..., Any],
        weights: list[FlatWeights],
        following: list[FlatWeights],
        *args: Any,
        kept: list[FlatWeights],
        **options: Any,
    ) -> Any:
        """Call a module with its weights; those that are kept stay available until the end of its backward pass."""
        for flat in weights:
            flat.acquire()
        for flat in following:
            flat.start()
        output = call(*args, **options)
        for flat in weights:
            if flat in kept and torch.is_grad_enabled() and flat.bucket not in self._in_backward:
                self._in_backward[flat.bucket] = flat
            else:
                flat.release()
        return output

    def _with_hook(self, call: Callable[..., Any], before_backward: Callable[[Tensor], None], *args: Any, **options: Any) -> Any:
        """Call a module, and make its weights available again before its backward pass."""
        output = call(*args, **options)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(before_backward)
        return output

    def _before_backward(self, weights: list[FlatWeights], preceding: list[FlatWeights], others: list[FlatWeights], _grad: Tensor) -> None:
        """Make the weights of a module available; release the frozen ones of the others of its stage, whose backward pass has ended."""
        for flat in others:
            self.backward_finished(flat.bucket)
        for flat in weights:
            if flat.bucket not in self._in_backward:
                self._in_backward[flat.bucket] = flat
                flat.acquire()
        for flat in preceding:
            flat.start()


def _first_freed(units: Iterable[list[FlatWeights]]) -> list[FlatWeights]:
    """The weights of the first unit that must be gathered for each use. A norm between two of them has none."""
    return next((weights for weights in units if any(flat.freed for flat in weights)), [])


def _units(stage: nn.Module) -> list[nn.Module]:
    """The modules with weights, in the order of their use."""
    units = []
    for name, child in stage.named_children():
        units += list(child.children()) if name == "blocks" else [child]
    return [unit for unit in units if any(True for _ in unit.parameters())]


def _read_in_backward(unit: nn.Module) -> list[nn.Parameter]:
    """The weights that the backward pass of a module reads: all but the tables of embeddings."""
    tables = (module for module in unit.modules() if isinstance(module, nn.Embedding | VocabParallelEmbedding))
    looked_up = {parameter for table in tables for parameter in table.parameters(recurse=False)}
    return [parameter for parameter in unit.parameters() if parameter not in looked_up]
