"""Section step: graphs of torch.compile and their breaks, launches, and waits of the host for the device in a training step."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.certification.batches import random_batches, to_device
from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch
from pipeline.rehearsal import graph_breaks
from pipeline.training.trainer import Trainer
from tools.gpu.rows import Row, Setup, guarded
from tools.jobs import build_trainer, configured, one_rank

MODEL = ("model=llama-tiny", "model.layers=4", "model.kv_heads=2", "precision=bf16", "training.document_mask=true")
EXPERTS = ("model=mixtral-tiny", "model.layers=2", "model.kv_heads=2", "precision=bf16")
SIZES = {
    "cuda": ("model.hidden=256", "model.heads=4", "model.ffn_hidden=512", "model.max_positions=512", "training.sequence_length=512"),
    "cpu": ("model.hidden=64", "model.heads=4", "model.ffn_hidden=96", "model.max_positions=32", "training.sequence_length=32"),
}
BATCH = ("training.micro_batch_size=2", "training.global_batch_size=4", "training.steps=4", "optimizer.warmup_steps=0")
#: Largest relative difference of the loss of compiled blocks: a rounding of bf16.
COMPILED = 2**-7
#: Operations behind `.item()`, `.tolist()`, a branch on a value, and an index with a boolean mask.
WAITING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.is_nonzero.default}
#: What PyTorch warns of with torch.cuda.set_sync_debug_mode.
WARNING = "called a synchronizing CUDA operation"
#: Steps before the measured one: buffers are made in the first, and graphs in the first two.
WARM = 2


def rows(setup: Setup) -> Iterator[Row]:
    with one_rank():
        yield from compiled(setup)
        for zero in (0, 3) if setup.quick else (0, 1, 2, 3):
            yield guarded(f"llama zero {zero}: waits of the host", waits, setup, (*MODEL, f"parallel.zero_stage={zero}"))
        yield guarded("mixtral: waits of the host", waits, setup, EXPERTS, expected=setup.cuda)
    if setup.cuda:
        retries = torch.cuda.memory_stats(setup.device)["num_alloc_retries"]
        yield Row.bounded("retries of the allocator", retries, 0, "in this section")
    else:
        yield Row.skipped("retries of the allocator", "no GPU")


def configuration(setup: Setup, *words: str) -> RunConfig:
    return configured(*words[:1], *SIZES[setup.device.type], *words[1:], *BATCH)


def trainer_of(setup: Setup, config: RunConfig) -> Trainer:
    """Return the trainer of a job of one rank; one that reads a value of the device in each step, if faults are planted."""
    trainer = build_trainer(config, setup.device)
    if setup.spoil:
        value = torch.ones((), device=setup.device)
        trainer.before_update = lambda: print(float(value))
    return trainer


def batches_of(setup: Setup, config: RunConfig) -> list[tuple[torch.Tensor, Batch]]:
    return [to_device(tokens, batch, setup.device) for tokens, batch in random_batches(config)]


def compiled(setup: Setup) -> Iterator[Row]:
    """Yield the rows of compiled blocks, beside blocks that are not."""
    from torch._dynamo.utils import counters

    words = (*MODEL, "parallel.zero_stage=1")
    backend = nullcontext() if setup.cuda else mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))
    stands_in = "" if setup.cuda else "; without inductor on a CPU"
    try:
        torch._dynamo.reset()
        counters.clear()
        graphs: list[int] = []
        before = 0
        losses: dict[str, list[float]] = {}
        with backend, graph_breaks.listening() as breaks:
            for mode in ("off", "on"):
                config = configuration(setup, *words, f"training.compile={mode}")
                before = int(counters["stats"]["unique_graphs"])  # without blocks, FlexAttention is compiled on a GPU
                trainer, found = trainer_of(setup, config), []
                for tokens, batch in batches_of(setup, config):
                    found.append(float(trainer.train(tokens, batch)[0]))
                    graphs.append(int(counters["stats"]["unique_graphs"]))
                losses[mode] = found
    except Exception as error:
        yield Row.failed("llama compiled", error)
        return
    first, last = (count - before for count in (graphs[-len(losses["on"])], graphs[-1]))
    where = "; ".join(f"{count} x {one}" for one, count in breaks.most_common(3))
    yield Row.bounded("llama: graphs of 4 equal blocks", first, 1, f"in the first step{stands_in}")
    yield Row.bounded("llama: graph breaks", sum(breaks.values()), 0, where)
    yield Row.bounded("llama: graphs compiled after the first step", last - first, 0, f"in {len(losses['on']) - 1} steps")
    difference = largest_difference(losses["on"], losses["off"])
    yield Row.bounded("llama: loss of compiled blocks beside others", difference, COMPILED, f"relative{stands_in}")
    tokens, batch = batches_of(setup, config)[0]
    yield guarded("llama: launches of a step", launches, setup, trainer, tokens, batch)
    if setup.cuda:
        yield guarded("llama compiled: waits of the host", counted, setup, trainer, batches_of(setup, config))


def largest_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two series; inf if one of them is zero."""
    return max(abs(a - b) / abs(b) if b else math.inf for a, b in zip(values, expected, strict=True))


def launches(name: str, setup: Setup, trainer: Trainer, tokens: torch.Tensor, batch: Batch) -> Row:
    """Count the kernels of a step of 2 micro-batches, on a CPU the operators."""
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * setup.cuda) as found:
        trainer.train(tokens, batch)
        if setup.cuda:
            torch.cuda.synchronize(setup.device)
    events = found.events() or []
    if not setup.cuda:
        count = sum(event.name.startswith("aten::") for event in events)
        return Row(name, value=float(count), remark="operators of 4 blocks and 2 micro-batches on a CPU, which launches no kernels")
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))]
    if not kernels:
        return Row.skipped(name, "the profiler sees no kernel: CUPTI is missing, or may not be used by users here")
    return Row(name, value=float(len(kernels)), remark="kernels of 4 blocks and 2 micro-batches, with the update")


def waits(name: str, setup: Setup, words: tuple[str, ...], *, expected: bool = True) -> Row:
    """Count the waits of the host in a step; none are expected, or their number is only reported."""
    config = configuration(setup, *words, "training.compile=off")
    return counted(name, setup, trainer_of(setup, config), batches_of(setup, config), expected=expected)


def counted(name: str, setup: Setup, trainer: Trainer, batches: list[tuple[torch.Tensor, Batch]], *, expected: bool = True) -> Row:
    """Count the waits of the host in the last of the batches."""
    for tokens, batch in batches[:WARM]:
        trainer.train(tokens, batch)
    tokens, batch = batches[WARM]
    with host_waits(setup) as found:
        trainer.train(tokens, batch)
    how = "torch.cuda.set_sync_debug_mode" if setup.cuda else "operations that would wait on a GPU"
    remark = "; ".join(f"{count} x {where}" for where, count in found.most_common(3)) or how
    total = sum(found.values())
    return Row.bounded(name, total, 0, remark) if expected else Row(name, value=float(total), remark=remark)


@contextmanager
def host_waits(setup: Setup) -> Iterator[Counter[str]]:
    """Count waits of the host by their place: on a GPU as PyTorch warns of them, on a CPU by operations that would wait on a GPU."""
    found: Counter[str] = Counter()
    if not setup.cuda:
        with _Waits(found):
            yield found
        return
    torch.cuda.synchronize(setup.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.update(f"{each.filename}:{each.lineno}" for each in caught if WARNING in str(each.message))


class _Waits(TorchDispatchMode):
    """Counts operations that wait for a GPU."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in WAITING:
            self._found[str(operation)] += 1
        return operation(*args, **(kwargs or {}))
