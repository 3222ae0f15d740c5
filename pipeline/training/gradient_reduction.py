"""Reduction of gradients over the ranks that hold the same weights, bucket by bucket while the backward pass is still running."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from pipeline.parallel.mesh import Mesh, reduce_over
from pipeline.training.buckets import Bucket, is_primary_copy
from pipeline.training.gradient_clipping import square_sum

#: Reductions in flight; each holds the flat gradient of a bucket.
MAX_PENDING = 2


class Reduction(Enum):
    """What a reduction leaves on a rank, and how often it happens."""

    ALL = "the whole gradient, once a step"
    PARTITION = "the rank's partition, once a step"
    PARTITION_EACH = "the rank's partition, after every micro-batch: no rank ever holds the gradient of the whole model"


class GradientReducer:
    """Accumulates the gradients of every bucket in fp32 and reduces them to their mean over the group.

    A weight's gradient is added to the flat gradient of its bucket as soon as autograd has computed it. When all gradients of a bucket have
    arrived, its collective starts, on a side stream on GPUs, and the whole gradient is freed after it. With several groups of ZeRO, it is
    reduced within the group, and once a step the partition is summed over the groups.

    Args:
        wire_dtype: in which a whole gradient is sent to the ranks of the group and summed. Sums over groups are fp32.
        on_complete: called with a bucket when all its gradients of a step, or with PARTITION_EACH of a micro-batch, have been computed.
        on_reduced: called with a bucket and its reduced gradient of a step, once, on the stream that has computed it.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        mesh: Mesh,
        reduction: Reduction,
        wire_dtype: torch.dtype = torch.float32,
        on_complete: Callable[[Bucket], None] = lambda _: None,
        on_reduced: Callable[[Bucket, Tensor], None] = lambda _bucket, _gradient: None,
    ) -> None:
        self.buckets, self._on_complete, self._on_reduced = buckets, on_complete, on_reduced
        self._mesh, self._reduction, self._wire_dtype = mesh, reduction, wire_dtype
        self._stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        self._states = {bucket: _State(bucket, mesh) for bucket in buckets}
        self._pending: deque[tuple[_State, Tensor, Tensor, Any]] = deque()
        self._across: deque[tuple[_State, Any]] = deque()
        self._reductions, self._share_squares = 1, None  # type: int, Tensor | None
        self._hooks: list[RemovableHandle] = []
        for state in self._states.values():
            for parameter in state.bucket.pieces:
                # Gradients arrive in the dtype of the weight: adding them to fp32 is then one pass over memory.
                parameter.grad_dtype = None
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self.arrived, state)))

    def close(self) -> None:
        """Remove the hooks. Python does not see the references that autograd holds: with them, no weight is ever freed."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def accumulate(self, micro_batches: int, *, measure: bool = False) -> Iterator[None]:
        """A context for the backward passes of a step; at its end `reduced` holds the result.

        Args:
            micro_batches: number of backward passes of every stage.
            measure: whether `shares` is called afterwards.
        """
        passes, reductions = (1, micro_batches) if self._reduction is Reduction.PARTITION_EACH else (micro_batches, 1)
        self._reductions = reductions
        self._share_squares = torch.zeros((), dtype=torch.float64, device=self._mesh.device) if measure else None
        for state in self._states.values():
            state.start(passes, reductions)
        yield
        self._sum_over_stages()
        for state in self._states.values():
            if state.flat is not None or not state.started:
                self._reduce(state)
        while self._pending:
            self._finish_oldest()
        with self._side_stream():
            for state in self._states.values():
                if state.remaining > 0:  # fewer reductions: a micro-batch without a gradient, or weights of several stages
                    self._sum_over_groups(state)
            while self._across:
                self._finish_oldest_sum()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def reduced(self, bucket: Bucket) -> Tensor:
        """The reduced flat gradient of a bucket, fp32: (elements,), or this rank's (partition_elements,)."""
        gradient = self._states[bucket].reduced
        assert gradient is not None, "no gradient has been reduced"
        return gradient

    def shares(self) -> tuple[Tensor, int] | None:
        """The mean squared norm of the gradients of the shares of a step, fp64, 0-dim, and their number; None if it was not measured.

        A share is what is reduced: that of a data rank in the batch, with PARTITION_EACH a micro-batch of a data rank. Collective.
        """
        if self._share_squares is None:
            return None
        total, ranks = self._share_squares, self._mesh.data.size()
        reduce_over(self._mesh.all_ranks, total)
        # The gradient of a share is that of the mean over its own samples, and a summand of the mean over its rank's micro-batches.
        return total * self._reductions / ranks, self._reductions * ranks

    def release(self) -> None:
        """Free the reduced gradients."""
        for state in self._states.values():
            state.reduced = None

    def arrived(self, state: _State, parameter: nn.Parameter) -> None:
        """Add the new gradient of a weight to its bucket."""
        state.add(parameter)
        if state.missing == 0:
            state.expect()
            self._on_complete(state.bucket)
            if not state.shared:
                self._reduce(state)

    def _sum_over_stages(self) -> None:
        """Sum the gradients of weights that several pipeline stages hold."""
        for state in sorted(self._states.values(), key=lambda state: state.bucket.name):  # the order of the stages' weights differs
            if state.stages is not None:
                dist.all_reduce(state.complete(), group=state.stages)

    def _reduce(self, state: _State) -> None:
        """Start the collective of a bucket, after the oldest one has ended if there are too many."""
        if len(self._pending) == MAX_PENDING:
            self._finish_oldest()
        flat, bucket = state.complete(), state.bucket
        state.started = True
        with self._side_stream():
            _sum([bucket.view(flat, parameter) for parameter in bucket.tensor_sums], self._mesh.tensor)
            if self._share_squares is not None:
                self._share_squares += square_sum([bucket.view(flat, parameter) for parameter in state.primary], self._mesh.device)
            ranks, work, result = bucket.group.size(), None, flat
            wire = flat.to(self._wire_dtype) if ranks > 1 else flat
            if ranks > 1 and self._reduction is Reduction.ALL:
                result = wire
                work = dist.all_reduce(wire, group=bucket.group, async_op=True)
            elif ranks > 1:
                result = wire.new_empty(bucket.partition_elements)
                work = dist.reduce_scatter_tensor(result, wire, group=bucket.group, async_op=True)
        state.free()
        self._pending.append((state, flat, result, work))

    def _finish_oldest(self) -> None:
        """Wait for a collective (on a GPU, the side stream waits) and add its result to the reduced gradient.

        The current stream waits too, before the memory of the whole gradient is used for another one. Were it recorded as used by the
        side stream instead, the allocator would reserve more memory for as long as the host runs ahead of the device.
        """
        state, flat, result, work = self._pending.popleft()
        with self._side_stream():
            if work is not None:
                work.wait()
            result = result.float()
            if state.replicas > 1:
                result /= state.replicas
            state.reduced = result if state.reduced is None else state.reduced.add_(result)
            state.remaining -= 1
            assert state.remaining >= 0, f"{state.bucket.name} was reduced after its last micro-batch"
            if state.remaining == 0:
                self._sum_over_groups(state)
        if self._stream is not None and flat is not state.reduced:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _sum_over_groups(self, state: _State) -> None:
        """Start to sum the gradient of a step over the groups of ZeRO, beside the next reductions; without groups it is final."""
        state.remaining = 0
        if state.bucket.replicas is None:
            self._on_reduced(state.bucket, self.reduced(state.bucket))
            return
        if len(self._across) == MAX_PENDING:
            self._finish_oldest_sum()
        self._across.append((state, dist.all_reduce(self.reduced(state.bucket), group=state.bucket.replicas, async_op=True)))

    def _finish_oldest_sum(self) -> None:
        """Wait for a sum over the groups (on a GPU, the side stream waits)."""
        state, work = self._across.popleft()
        work.wait()
        self._on_reduced(state.bucket, self.reduced(state.bucket))

    def _side_stream(self) -> AbstractContextManager[Any]:
        """The side stream, after all work that is queued on the current stream."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


class _State:
    """The gradient of a bucket during a step.

    Attributes:
        shared: whether several pipeline stages hold its weights, on this or on other ranks.
        stages: the ranks that hold the weights of several stages, None if this rank does not take part.
        replicas: number of summands of the mean. The gradient of an expert is the sum over the tokens of all expert ranks.
        primary: weights of which this rank has the copy that counts in the norm of a data rank's gradient.
        flat: the whole gradient, fp32; None until a gradient arrives.
        missing: number of gradients until the bucket is complete.
        started: whether a collective has been started in this step.
        remaining: reductions of the step that have not ended.
        reduced: the reduced gradient so far.
    """

    def __init__(self, bucket: Bucket, mesh: Mesh) -> None:
        self.bucket = bucket
        kind = next(iter(bucket.pieces.values())).shared
        self.shared = bool(kind)
        self.stages = {"": None, "tied_embedding": mesh.tied_embedding, "pipeline": mesh.pipeline}[kind]
        if self.stages is not None and self.stages.size() == 1:
            self.stages = None
        self.replicas = mesh.data.size() * mesh.layout.expert
        self.primary = [parameter for parameter, piece in bucket.pieces.items() if is_primary_copy(piece, mesh)]
        self.flat: Tensor | None = None
        self.reduced: Tensor | None = None
        self._device = mesh.device
        self._sums: dict[nn.Parameter, Tensor] = {}  # views of `flat`
        self._passes = self.missing = self.remaining = 0
        self.started = False

    def start(self, passes: int, reductions: int) -> None:
        """Expect this number of gradients for every weight until each of the reductions."""
        assert self.flat is None, "the last step has not been finished"
        self.reduced = None
        self._passes, self.remaining, self.started = passes, reductions, False
        self.expect()

    def expect(self) -> None:
        """Count the gradients of the next backward passes."""
        self.missing = self._passes * len(self.bucket.pieces)

    def add(self, parameter: nn.Parameter) -> None:
        """Move a weight's gradient into the flat gradient, and leave none at the weight.

        torch.compile breaks the graph at a weight whose gradient has another dtype, and blocks may be compiled after a backward pass.
        """
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if (total := self._sums.get(parameter)) is not None:
            total.add_(gradient)
        elif gradient.dtype == torch.float32 and gradient.numel() == self.bucket.elements and gradient.is_contiguous():
            self.flat = gradient.view(-1)  # the only weight: the output head, whose loss computes an fp32 gradient
            self._sums[parameter] = gradient
        else:
            self._sums[parameter] = self.bucket.view(self._allocated(), parameter).copy_(gradient)
        self.missing -= 1

    def complete(self) -> Tensor:
        """The whole gradient, zeros for weights without one."""
        flat, end = self._allocated(), 0
        for parameter, piece in self.bucket.pieces.items():
            if parameter not in self._sums:
                self._sums[parameter] = self.bucket.view(flat, parameter).zero_()
            end += piece.elements
        flat[end:].zero_()
        return flat

    def free(self) -> None:
        """Drop the whole gradient."""
        self._sums.clear()
        self.flat = None

    def _allocated(self) -> Tensor:
        if self.flat is None:
            self.flat = torch.empty(self.bucket.elements, dtype=torch.float32, device=self._device)
        return self.flat


def _sum(tensors: list[Tensor], group: ProcessGroup) -> None:
    """Sum tensors over a group in place, with one collective."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    torch._foreach_copy_(
        tensors, [part.view_as(tensor) for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
    )
