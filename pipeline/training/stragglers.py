"""Stragglers: the forward passes of every rank are timed, and a node whose passes are slow is named.

A forward pass of a rank's own stages has no wait for other pipeline stages, and none for the reduction of gradients, which is where ranks
wait for a slow one. The first micro-batch of every step is timed, on a GPU by events, whose times are read when they have passed: the host
never waits for the device. Collectives inside of a forward pass (tensor, context and expert parallelism, ZeRO 3) are part of it: within
them, a slow rank slows its peers as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.common import events
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.parallel.mesh import reduce_over
from pipeline.training.callback import Callback
from pipeline.training.step_control import HostCopy
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")

#: Intervals in a row in which a node must be slow.
INTERVALS = 3
#: Most nodes that a message names.
_NAMED = 8


class StageTimer:
    """Times the first forward pass of each stage after `arm`, by hooks."""

    def __init__(self, stages: Sequence[nn.Module], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._armed: set[int] = set()
        self._began: dict[int, Any] = {}
        self._pending: list[list[tuple[Any, Any]]] = []
        self._count = len(stages)
        for index, stage in enumerate(stages):
            stage.register_forward_pre_hook(lambda *_, index=index: self._begin(index))
            stage.register_forward_hook(lambda *_, index=index: self._end(index))

    def arm(self) -> None:
        """Time the next forward pass of each stage."""
        self._armed = set(range(self._count))
        self._pending.append([])

    def seconds(self) -> list[float]:
        """Return the times of the steps that are complete by now, each the sum over the stages; they are forgotten."""
        done, self._pending = self._pending, []
        if self._cuda:
            finished = [all(end.query() for _, end in step) for step in done]
            self._pending = [step for step, known in zip(done, finished, strict=True) if not known][-1:]
            done = [step for step, known in zip(done, finished, strict=True) if known]
            return [sum(begin.elapsed_time(end) for begin, end in step) / 1e3 for step in done if len(step) == self._count]
        return [sum(end - begin for begin, end in step) for step in done if len(step) == self._count]

    def _begin(self, index: int) -> None:
        if index in self._armed and torch.is_grad_enabled():
            self._began[index] = self._now()

    def _end(self, index: int) -> None:
        if index in self._armed and torch.is_grad_enabled():
            self._armed.discard(index)
            self._pending[-1].append((self._began.pop(index), self._now()))

    def _now(self) -> Any:
        """The time in seconds, or an event of the device."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Stragglers(Callback):
    """Names the slow nodes of a job, on rank 0.

    Args:
        hosts: host name of each rank.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, hosts: Sequence[str]) -> None:
        self._run_dir, self._mesh, self._every = Path(config.run_dir), trainer.mesh, config.tracking.log_every
        stages = list(trainer.model.stage_modules())
        self._timer = StageTimer(stages, trainer.mesh.device) if trainer.mesh.layout.world_size > 1 else None
        self._judge = SlowNodes(trainer.mesh.layout, hosts, config.cluster.slow_factor)
        self._pending: tuple[int, HostCopy] | None = None

    @contextmanager
    def during_step(self, number: int) -> Iterator[None]:
        """Time a step, and every `every` steps exchange the times: one fp32 number a rank, in a sum over all ranks. Collective."""
        if self._timer is None:
            yield
            return
        if self._pending is not None and self._mesh.rank == 0:
            self._tell(*self._pending)
        self._pending = None
        self._timer.arm()
        yield
        if number % self._every == 0:
            seconds = self._timer.seconds()
            self._pending = number, HostCopy(self._gather(median(seconds) if seconds else 0.0))

    def _gather(self, seconds: float) -> Tensor:
        """Return the time of every rank, fp32 (ranks,), in sums over the groups of the mesh: no communicator of all ranks is needed."""
        times = torch.zeros(self._mesh.layout.world_size, device=self._mesh.device)
        times[self._mesh.rank].fill_(seconds)
        reduce_over(self._mesh.all_ranks, times)
        return times

    def _tell(self, step: int, times: HostCopy) -> None:
        """Log the slow nodes, if they are others than before."""
        if (slow := self._judge.changed(times.values())) is None:
            return
        if not slow:
            log.info("step %d: no node is slow any more", step)
            return
        worst = sorted(slow.items(), key=lambda item: -item[1][0])[:_NAMED]
        named = ", ".join(f"{host} (rank {rank}: {ratio:.1f} times)" for host, (ratio, rank) in worst)
        more = f" and {len(slow) - _NAMED} more" if len(slow) > _NAMED else ""
        text = "step %d: forward passes are slower than the median of all ranks of their pipeline stage, in %d intervals in a row, on %s%s"
        log.warning(text, step, INTERVALS, named, more)
        nodes = {host: {"rank": rank, "ratio": round(ratio, 3)} for host, (ratio, rank) in worst}
        events.record(self._run_dir, "straggler", step=step, nodes=nodes, count=len(slow))


class SlowNodes:
    """Judges the times of all ranks.

    A node is slow if the slowest of its ranks takes more than `factor` times the median of the ranks with the same pipeline stages, which
    have the same work, in INTERVALS intervals in a row.

    Args:
        hosts: host name of each rank.
        factor: cluster.slow_factor.
    """

    def __init__(self, layout: Layout, hosts: Sequence[str], factor: float) -> None:
        self._stages: dict[int, list[int]] = {}
        for rank in range(layout.world_size):
            self._stages.setdefault(layout.coordinates(rank).pipeline, []).append(rank)
        self._hosts, self._factor = hosts, factor
        self._in_a_row: dict[str, int] = {}
        self._told: set[str] = set()

    def changed(self, times: Sequence[float]) -> dict[str, tuple[float, int]] | None:
        """Take the times of an interval.

        Args:
            times: of each rank, 0 if it is unknown.

        Returns:
            Host -> (ratio to the median, its slowest rank) of the slow nodes; None if they are those of the last answer.
        """
        ratios: dict[str, tuple[float, int]] = {}
        for ranks in self._stages.values():
            known = [rank for rank in ranks if times[rank] > 0]
            middle = median(times[rank] for rank in known) if known else 0.0
            for rank in known:
                ratios[self._hosts[rank]] = max(ratios.get(self._hosts[rank], (0.0, rank)), (times[rank] / middle, rank))
        above = {host for host, (ratio, _) in ratios.items() if ratio > self._factor}
        self._in_a_row = {host: self._in_a_row.get(host, 0) + 1 for host in above}
        slow = {host for host, count in self._in_a_row.items() if count >= INTERVALS}
        if slow == self._told:
            return None
        self._told = slow
        return {host: ratios[host] for host in slow}
