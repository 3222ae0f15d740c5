"""Simulation of a pipeline schedule: the time of a step and the activations in flight, from the times of the stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from pipeline.config.layout import Layout

#: A forward pass, a backward pass, or with zbv its halves: the gradients of inputs and of weights.
Action = tuple[str, int, int]
#: Rounds of the pipeline that are simulated; further micro-batches take as long as the busiest rank works on one.
ROUNDS = 3


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch on a stage, the backward pass without and with the gradients of weights."""

    forward: float
    backward_inputs: float
    backward: float


def orders(layout: Layout, micro_batches: int) -> list[list[Action]]:
    """Return the actions (F, B, I or W, stage, micro-batch) of every pipeline rank in order, for 1f1b and interleaved."""
    return [list(_order(rank, layout.pipeline, layout.stages_per_rank, micro_batches)) for rank in range(layout.pipeline)]


@lru_cache(maxsize=4096)
def _order(rank: int, ranks: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """1F1B (Narayanan et al. 2019), or with several stages per rank its interleaved form (Narayanan et al. 2021)."""
    total = micro_batches * chunks
    per_round = round_size(ranks, micro_batches) if chunks > 1 else 1
    group = per_round * chunks

    def forward(index: int) -> Action:
        if chunks == 1:
            return "F", rank, index
        chunk = index % group // per_round
        return "F", rank + chunk * ranks, index // group * per_round + index % per_round

    def backward(index: int) -> Action:
        if chunks == 1:
            return "B", rank, index
        chunk = chunks - 1 - index % group // per_round
        return "B", rank + chunk * ranks, index // group * per_round + index % per_round

    ahead = ranks - rank - 1 if chunks == 1 else (ranks - rank - 1) * 2 + (chunks - 1) * per_round
    ahead = min(ahead, total)
    actions = [forward(index) for index in range(ahead)]
    for index in range(total - ahead):
        actions += [forward(ahead + index), backward(index)]
    return tuple(actions + [backward(index) for index in range(total - ahead, total)])


def round_size(ranks: int, micro_batches: int) -> int:
    """Return the micro-batches of a round of the interleaved schedule, as in PyTorch's ScheduleInterleaved1F1B."""
    return micro_batches // max(1, micro_batches // ranks)


def simulate(layout: Layout, stages: list[StageTime], send: Callable[[int], float], saved: list[float]) -> tuple[float, list[float]]:
    """Return the time of the forward and backward passes of a step in seconds, and the most bytes in flight on every pipeline rank.

    Args:
        layout: pipeline ranks, stages, schedule and micro-batches.
        stages: of every stage.
        send: seconds to send the activations from a stage to the next one.
        saved: bytes that a micro-batch keeps on every stage between its forward and backward pass.
    """
    total = layout.micro_batches
    if layout.pipeline == 1:
        return total * sum(stage.forward + stage.backward for stage in stages), [sum(saved)]
    size = round_size(layout.pipeline, total) if layout.stages_per_rank > 1 else layout.pipeline
    simulated = min(total, ROUNDS * size)
    if layout.schedule == "zbv":
        time, flight = _zero_bubble(layout, stages, send, saved, simulated)
    else:
        time, flight = _ordered(layout, stages, send, saved, simulated)
    work = [sum(stages[stage].forward + stages[stage].backward for stage in layout.stages(rank)) for rank in range(layout.pipeline)]
    return time + (total - simulated) * max(work), flight


def _ordered(
    layout: Layout, stages: list[StageTime], send: Callable[[int], float], saved: list[float], micro_batches: int
) -> tuple[float, list[float]]:
    """Every rank executes its actions in order, each as soon as its input has arrived."""
    last = layout.stage_count - 1
    done: dict[Action, float] = {}
    plans = orders(layout, micro_batches)
    position, clock = [0] * layout.pipeline, [0.0] * layout.pipeline
    bytes_now, most = [0.0] * layout.pipeline, [0.0] * layout.pipeline
    moving = True
    while moving:
        moving = False
        for rank, plan in enumerate(plans):
            while position[rank] < len(plan):
                kind, stage, index = action = plan[position[rank]]
                if kind == "F":
                    needed = ("F", stage - 1, index) if stage > 0 else None
                    delay = send(stage - 1) if needed else 0.0
                else:
                    needed = ("B", stage + 1, index) if stage < last else ("F", stage, index)
                    delay = send(stage) if stage < last else 0.0
                if needed is not None and needed not in done:
                    break
                start = max(clock[rank], done[needed] + delay if needed is not None else 0.0)
                clock[rank] = done[action] = start + (stages[stage].forward if kind == "F" else stages[stage].backward)
                bytes_now[rank] += saved[stage] if kind == "F" else -saved[stage]
                most[rank] = max(most[rank], bytes_now[rank])
                position[rank] += 1
                moving = True
    assert all(position[rank] == len(plan) for rank, plan in enumerate(plans)), "the schedule waits for itself"
    return max(clock), most


def _zero_bubble(
    layout: Layout, stages: list[StageTime], send: Callable[[int], float], saved: list[float], micro_batches: int
) -> tuple[float, list[float]]:
    """ZB-V (Qi et al. 2024) as its greedy form: gradients of inputs first, then forward passes within the memory limit, then weights."""
    last, limit = layout.stage_count - 1, 2 * layout.pipeline
    done: dict[Action, float] = {}
    clock, flight = [0.0] * layout.pipeline, [0] * layout.pipeline
    bytes_now, most = [0.0] * layout.pipeline, [0.0] * layout.pipeline
    pending: list[list[tuple[int, int]]] = [[] for _ in range(layout.pipeline)]
    next_forward, next_backward = [0] * (last + 1), [0] * (last + 1)
    left = 3 * micro_batches * (last + 1)
    while left:
        best: tuple[float, int, int, Action] | None = None
        for rank in range(layout.pipeline):
            for stage in layout.stages(rank):
                index = next_backward[stage]
                source = ("I", stage + 1, index) if stage < last else ("F", stage, index)
                if index < micro_batches and source in done and ("F", stage, index) in done:
                    ready = max(clock[rank], done[source] + (send(stage) if stage < last else 0.0))
                    best = min(best, (ready, 0, rank, ("I", stage, index))) if best else (ready, 0, rank, ("I", stage, index))
                index = next_forward[stage]
                source = ("F", stage - 1, index)
                second = stage >= layout.pipeline  # on the way back: it must never wait for memory
                if index < micro_batches and (second or flight[rank] < limit) and (stage == 0 or source in done):
                    ready = max(clock[rank], done[source] + send(stage - 1) if stage else 0.0)
                    option = (ready, 1 if second else 2, rank, ("F", stage, index))
                    best = min(best, option) if best else option
            if pending[rank]:
                stage, index = pending[rank][0]
                option = (clock[rank], 3, rank, ("W", stage, index))
                best = min(best, option) if best else option
        assert best is not None, "the schedule waits for itself"
        start, _, rank, action = best
        kind, stage, index = action
        times = stages[stage]
        length = {"F": times.forward, "I": times.backward_inputs, "W": times.backward - times.backward_inputs}[kind]
        clock[rank] = done[action] = start + length
        left -= 1
        if kind == "F":
            next_forward[stage] += 1
            flight[rank] += 1
            bytes_now[rank] += saved[stage]
            most[rank] = max(most[rank], bytes_now[rank])
        elif kind == "I":
            next_backward[stage] += 1
            pending[rank].append((stage, index))
        else:
            pending[rank].pop(0)
            flight[rank] -= 1
            bytes_now[rank] -= saved[stage]
    return max(clock), most
