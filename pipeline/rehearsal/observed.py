"""The trainer of a rehearsal: the real one, which notes memory, times, collectives, launches and waits of single steps."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.config.hardware import Hardware
from pipeline.config.schema import RunConfig
from pipeline.layers.batch import Batch
from pipeline.parallel import rehearsed_group
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.rehearsed_group import Call
from pipeline.rehearsal.analysis import Findings, analyze, axis_names
from pipeline.rehearsal.calls import DeviceCalls, Launches
from pipeline.rehearsal.compiled_kernels import SeenKernels, launches_told
from pipeline.rehearsal.memory import BETWEEN, Moments
from pipeline.rehearsal.operations import OperationRecorder, recorded
from pipeline.rehearsal.record import STEP
from pipeline.training.trainer import Trainer
from pipeline.training.weight_update import StepResult

log = logging.getLogger("pipeline.rehearsal")
log.setLevel(logging.INFO)  # also where the messages of training are left out


#: Steps that are recorded: what one leaves to run beside the next one is seen in the second.
RECORDED = 2


@dataclass
class Observations:
    """What was seen of the steps.

    Attributes:
        seconds: of the host in each step, in Trainer.train: CPU seconds of this process.
        first_step: seconds of the first step by the clock, with those in which it is compiled.
        calls: collectives of the observed step, in order.
        launches: of the timed step.
        waits: (function, line of code) -> number of waits of the host in the observed step.
        kernels: name -> launches in the observed step.
        generated: kernels of the compiler in the observed step.
        block: launches of the forward pass of one block.
        kept: index of a block -> bytes that are allocated more when the next one begins, in the first forward pass of the observed step.
        findings: of the last two recorded steps; None if they were not recorded.
        has_forward: whether a forward pass of the observed step has ended.
    """

    seconds: list[float] = field(default_factory=list)
    first_step: float = 0.0
    calls: list[Call] = field(default_factory=list)
    launches: Launches = field(default_factory=Launches)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    generated: SeenKernels = field(default_factory=SeenKernels)
    block: Launches | None = None
    kept: dict[int, int] = field(default_factory=dict)
    has_forward: bool = False
    findings: Findings | None = None


class ObservedTrainer(Trainer):
    """Trainer, observed.

    Args:
        moments: where memory is noted.
        device: the driver.
        observed: number of the step in which everything is recorded, from 1 on.
        timed: number of the step whose launches are counted, while nothing is recorded. In RECORDED steps after it operators are recorded,
            which makes them slow: they are not in Observations.seconds.
    """

    def __init__(
        self, config: RunConfig, mesh: Mesh, moments: Moments, device: DeviceCalls, observed: int, timed: int, hardware: Hardware
    ) -> None:
        super().__init__(config, mesh)
        self.seen = Observations()
        self._moments, self._device, self._observed, self._timed = moments, device, observed, timed
        self._number, self._observing = 0, False
        self._hardware, self._recording = hardware, ExitStack()
        self._recorder: OperationRecorder | None = None
        stage = next(iter(self.model.stage_modules()))
        stage.register_forward_hook(self._forward_ended)
        self._allocated: dict[int, int] = {}
        for index, block in stage.blocks.items():
            # Around the compiled call: torch.compile would trace hooks of the module, and compile it again when they do something else.
            call = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = partial(self._block, int(index), call)

    def train(self, tokens: Tensor, batch: Batch, requests: Sequence[bool] = (), step: int = 0) -> tuple[Tensor, StepResult]:
        """See Trainer."""
        self._number += 1
        self._device.reset()
        if self._timed < self._number <= self._timed + RECORDED:
            return self._recorded_step(tokens, batch, requests, step)
        if self._number != self._observed:
            return self._timed_step(tokens, batch, requests, step)
        rehearsed_group.listen(self.seen.calls.append)
        before_update, self.before_update = self.before_update, self._backward_ended(self.before_update)
        self._moments.note(BETWEEN)
        self._observing = True
        try:
            with self._device.recorded(self.seen.waits, self.seen.kernels), launches_told(self.seen.generated.launched):
                result = self._timed_step(tokens, batch, requests, step)
        finally:
            rehearsed_group.listen(None)
            self.before_update, self._observing = before_update, False
        self._moments.note("optimizer")
        return result

    def evaluate(self, tokens: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """See Trainer."""
        self._moments.note(BETWEEN)
        result = super().evaluate(tokens, batch)
        self._moments.note("validation")
        return result

    def _recorded_step(self, tokens: Tensor, batch: Batch, requests: Sequence[bool], step: int) -> tuple[Tensor, StepResult]:
        """A step whose operators are recorded; after the last one, the record is analyzed."""
        if self._recorder is None:
            self._recording.enter_context(self._device.unlimited())  # recomputations run to their end, and need more memory
            self._recorder = self._recording.enter_context(recorded(self._hardware, axis_names(self.mesh)))
            rehearsed_group.listen(self._recorder.collective)
        self._recorder.mark(STEP)
        result = super().train(tokens, batch, requests, step)
        if self._number == self._timed + RECORDED:
            rehearsed_group.listen(None)
            self._recording.close()
            self.seen.findings = analyze(self._recorder.entries, self._hardware, RECORDED * self.seen.seconds[-1])
            self._recorder = None
            torch.cuda.reset_peak_memory_stats()
        return result

    def _timed_step(self, tokens: Tensor, batch: Batch, requests: Sequence[bool], step: int) -> tuple[Tensor, StepResult]:
        """A step whose seconds are noted: of the CPU, since other processes may slow the machine down, and nothing waits for the device."""
        began, started = time.perf_counter(), time.process_time()
        result = super().train(tokens, batch, requests, step)
        self.seen.seconds.append(time.process_time() - started)
        self.seen.first_step = self.seen.first_step or time.perf_counter() - began
        log.info("rehearse: step %d: %.2f s of the host", self._number, self.seen.seconds[-1])
        if self._number == self._timed:
            self.seen.launches = self._device.launches()
        return result

    def _forward_ended(self, *_: object) -> None:
        """Note the memory at the end of the first forward pass of the observed step."""
        if self._observing and not self.seen.has_forward:
            self._moments.note("forward")
            self.seen.has_forward = True

    def _backward_ended(self, before_update: Callable[[], None]) -> Callable[[], None]:
        """Note the memory at the end of the backward passes, before the update."""

        def noted() -> None:
            self._moments.note("backward")
            before_update()

        return noted

    def _block(self, index: int, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a block; in the first forward pass of the observed step, note its launches and what it leaves allocated."""
        if not self._observing or self.seen.has_forward or index in self._allocated:
            return call(*args, **options)
        self._allocated[index] = torch.cuda.memory_allocated()
        if index - 1 in self._allocated:
            self.seen.kept[index - 1] = self._allocated[index] - self._allocated[index - 1]
        began = self._device.launches()
        result = call(*args, **options)
        if self.seen.block is None:
            self.seen.block = self._device.launches() - began
        return result
