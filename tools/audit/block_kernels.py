"""Kernels of whole blocks on one GPU, forward and backward: recorded in a process that has the driver without a GPU (pipeline/rehearsal).

Each block of a model is compiled as the trainer compiles it, with the trainer's hooks that add gradients to buckets, and runs three times:
it is compiled; the driver counts its calls; operators and generated kernels are recorded with their bytes and times.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline.config.hardware import Hardware
from pipeline.config.layout import Coordinates, Layout
from pipeline.config.schema import RunConfig
from pipeline.layers.attention import AttentionContext
from pipeline.layers.row_counts import VALUES
from pipeline.layers.stack import Stack
from pipeline.parallel import mesh as meshes
from pipeline.parallel.parallelize import LocalModel, connect, init_weights
from pipeline.parallel.partition import partition_weights
from pipeline.planner import trace
from pipeline.rehearsal.calls import DeviceCalls
from pipeline.rehearsal.compiled_kernels import GeneratedKernel, SeenKernels, launches_told
from pipeline.rehearsal.operations import OperationRecorder, recorded
from pipeline.rehearsal.record import Entry, Mark, Work
from pipeline.training.buckets import build_buckets
from pipeline.training.gradient_reduction import GradientReducer, Reduction
from tools.audit.plain_block import PlainBlock

#: generated: a kernel of Inductor. other: kernels, copies and fills of PyTorch's operators, but for those that add gradients to buckets.
Kind = Literal["generated", "product", "attention", "gradient", "other"]
KINDS: tuple[Kind, ...] = ("generated", "product", "attention", "gradient", "other")
PASSES = ("forward", "backward")
#: Compiled, counted, recorded.
ROUNDS = 3


@dataclass(frozen=True)
class Launch:
    """An operation of a pass.

    Attributes:
        kind: what it is.
        name: of the generated kernel, or of the operator; of the weight whose gradient is added to its bucket.
        site: line of code, "" in the backward pass.
        seconds: on the GPU, as planned.
    """

    kind: Kind
    name: str
    site: str
    seconds: float


@dataclass(frozen=True)
class Pass:
    """The forward or the backward pass of a block.

    Attributes:
        launches: operations, in order.
        kernels, products, copies: what the driver was asked to launch: an operator of PyTorch may be several kernels. A graph of cuDNN,
            which is one attention, is none of them.
        names: kernel -> launches of it, as the driver saw them.
        waits: of the host for the device, "line of code: function of CUDA" -> number.
        generated: the generated kernels.
    """

    launches: list[Launch]
    kernels: int
    products: int
    copies: int
    names: dict[str, int]
    waits: dict[str, int]
    generated: list[GeneratedKernel]

    def count(self, kind: Kind) -> int:
        """Number of operations of a kind."""
        return sum(launch.kind == kind for launch in self.launches)

    def content(self) -> dict[str, Any]:
        counts = {kind: self.count(kind) for kind in KINDS}
        seconds = sum(launch.seconds for launch in self.launches)
        return {"counts": counts, "seconds": seconds, **dataclasses.asdict(self)}


class _Captured(Exception):  # noqa: N818 - not an error
    """All blocks have been called."""


def kernels_of(config: RunConfig, hardware: Hardware) -> list[dict[str, Any]]:
    """Return the passes of one block of each kind, and for a Llama those of PlainBlock, as values of JSON.

    Args:
        config: of a job with one rank.
        hardware: the GPU that the driver answers for.
    """
    torch._dynamo.reset()
    VALUES.missing = True
    device = meshes.init_rehearsed(0, 1)
    calls = DeviceCalls(0)
    try:
        with calls.unlimited():
            return [*_blocks(config, hardware, device, calls)]
    finally:
        meshes.destroy_process_group()


def _blocks(config: RunConfig, hardware: Hardware, device: torch.device, calls: DeviceCalls) -> Iterator[dict[str, Any]]:
    """Yield the result of each block."""
    layout = Layout(1, 1, 1, 1, 1, micro_batches=1)
    stage, kinds = trace.one_of_each_kind(config)
    mesh = meshes.build_mesh(layout, device)
    model = LocalModel({0: stage}, partition_weights({0: stage}, config.model, layout, Coordinates(0, 0, 0, 0, 0)))
    connect(config, mesh, model)
    init_weights(model, config, device, lambda piece, dtype: torch.empty(piece.shape, dtype=dtype, device=device))
    adding = _Adding()
    adding.before(model)
    reducer = GradientReducer(build_buckets(model, mesh, sequence_parallel=False), mesh, Reduction.ALL)
    adding.after(model)
    for name, arguments in _inputs(stage, config, device).items():
        with reducer.accumulate(ROUNDS + 1):  # one more than there are: no bucket is complete while a block is recorded
            passes = _passes(_Run(stage.blocks[name], arguments), hardware, calls, adding)
        yield _content(f"block {name}", kinds.count(name), passes)
    if config.model.family == "llama":
        block = PlainBlock(config.model).to(device, torch.bfloat16)
        block.compile()
        x = torch.empty(config.training.micro_batch_size, config.training.sequence_length, config.model.hidden, device=device)
        x = x.to(torch.bfloat16).requires_grad_()
        yield _content("plain block", 0, _passes(_Run(block, [x, *block.tables(x)]), hardware, calls, _Adding()))


def _content(name: str, blocks: int, passes: dict[str, Pass]) -> dict[str, Any]:
    """The result of a block as values of JSON."""
    return {"name": name, "blocks": blocks, **{key: found.content() for key, found in passes.items()}}


class _Adding:
    """Notes which weight's gradient is being added to its bucket."""

    def __init__(self) -> None:
        self.recorder: OperationRecorder | None = None

    def before(self, model: LocalModel) -> None:
        """Register hooks of the weights that run before those that are registered next."""
        for parameter, piece in model.pieces.items():
            parameter.register_post_accumulate_grad_hook(partial(self._mark, piece.name))

    def after(self, model: LocalModel) -> None:
        """Register hooks of the weights that run after those that were registered before."""
        for parameter in model.pieces:
            parameter.register_post_accumulate_grad_hook(partial(self._mark, ""))

    def _mark(self, name: str, _: Tensor) -> None:
        if self.recorder is not None:
            self.recorder.mark(name)


def _inputs(stage: Stack, config: RunConfig, device: torch.device) -> dict[str, list[Any]]:
    """Return the arguments of each block in a forward pass of the model, such that gradients end there."""
    found: dict[str, list[Any]] = {}
    calls = {name: block._compiled_call_impl for name, block in stage.blocks.items()}

    def seen(name: str, x: Tensor, *more: Any) -> Tensor:
        found[name] = [_leaf(argument) for argument in (x, *more)]
        if len(found) == len(calls):
            raise _Captured
        return x

    for name, block in stage.blocks.items():
        block._compiled_call_impl = partial(seen, name)  # as ObservedTrainer does
    tokens, batch = trace.empty_inputs(config, device)
    try:
        stage(tokens, **batch)
    except _Captured:
        pass
    finally:
        for name, block in stage.blocks.items():
            block._compiled_call_impl = calls[name]
    return found


def _leaf(argument: Any) -> Any:
    """An argument of a block, whose gradient goes no further; the bias of a mask is in a context."""
    if isinstance(argument, Tensor):
        return argument.detach().requires_grad_()
    if argument.mask.bias is not None:
        return replace(argument, mask=argument.mask.replace(bias=argument.mask.bias.detach().requires_grad_()))
    return argument


class _Run:
    """A block and its arguments."""

    def __init__(self, block: nn.Module, arguments: list[Any]) -> None:
        self._block, self._arguments = block, arguments
        biases = [mask.bias for context in arguments if isinstance(context, AttentionContext) for mask in (context.mask, context.cross)]
        self._leaves = [*block.parameters(), *(leaf for leaf in (*arguments, *biases) if isinstance(leaf, Tensor))]

    def __call__(self, during: Callable[[str], AbstractContextManager[Any]]) -> None:
        """A forward and a backward pass, each in the context of its name. No leaf has a gradient before: it would be added to that."""
        for leaf in self._leaves:
            leaf.grad = None
        with during("forward"):
            y = self._block(*self._arguments)
        gradient = torch.empty_like(y)
        with during("backward"):
            y.backward(gradient)


def _passes(run: _Run, hardware: Hardware, calls: DeviceCalls, adding: _Adding) -> dict[str, Pass]:
    """Run a block ROUNDS times and return its passes."""
    run(lambda _: nullcontext())
    counted = {name: _Counted() for name in PASSES}
    run(lambda name: counted[name].during(calls))
    seen = {name: SeenKernels() for name in PASSES}
    entries: dict[str, list[Entry]] = {}
    with recorded(hardware, {}) as recorder:
        adding.recorder = recorder

        @contextmanager
        def during(name: str) -> Iterator[None]:
            begin = len(recorder.entries)
            with launches_told(seen[name].launched):
                yield
            entries[name] = recorder.entries[begin:]

        run(during)
        adding.recorder = None
    passes = {}
    for name in PASSES:
        generated = seen[name].found()
        launches = list(_launches(entries[name], {kernel.name for kernel in generated}))
        passes[name] = Pass(launches, *counted[name].launched, dict(counted[name].names), dict(counted[name].waits), generated)
    return passes


class _Counted:
    """What the driver counts in a pass; see Pass."""

    def __init__(self) -> None:
        self.launched = (0, 0, 0)
        self.names: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    @contextmanager
    def during(self, calls: DeviceCalls) -> Iterator[None]:
        waits: Counter[tuple[str, str]] = Counter()
        calls.reset()
        with calls.recorded(waits, self.names):
            yield
        counted = calls.launches()
        self.launched = counted.kernels, counted.products, counted.copies
        self.waits.update({f"{line or '(compiled code)'}: {function}": count for (function, line), count in waits.items()})


def _launches(entries: list[Entry], generated: set[str]) -> Iterator[Launch]:
    """Yield the operations of a pass."""
    weight = ""
    for entry in entries:
        if isinstance(entry, Mark):
            weight = entry.name
        elif isinstance(entry, Work):
            kind: Kind = "other"
            if weight:
                kind = "gradient"
            elif entry.kind in ("product", "attention"):
                kind = entry.kind
            elif entry.name in generated:
                kind = "generated"
            yield Launch(kind, weight or entry.name, entry.site, entry.seconds)
