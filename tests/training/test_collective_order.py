"""No sum over ranks follows the gathering of weights: NCCL would run it behind them, and the device would wait for all weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training.layouts import text
from tests.world import share_of, trainer

MOE = ("model=mixtral-tiny", "model.layers=2", "training.sequence_length=16", "training.micro_batch_size=1", "training.global_batch_size=4")


def collectives(*words: str) -> list[tuple[str, bool]]:
    """Name of every collective of a second step on this rank, and whether it is asynchronous."""
    config, mine = trainer(*MOE, *words)
    seen: list[tuple[str, bool]] = []

    def counted(name: str, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        seen.append((name, bool(options.get("async_op"))))
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        for step in range(2):
            batch = share_of(mine, *text(config, step))
            if step:
                for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
                    patch.setattr(dist, name, partial(counted, name, getattr(dist, name)))
            mine.train(*batch, [False], step)
    return seen


@pytest.mark.parametrize("stage", [1, 2])
def test_the_last_collectives_of_a_step_gather_the_weights(worlds, stage: int) -> None:
    for seen in worlds(2).run(collectives, f"parallel.zero_stage={stage}"):
        gathers = [number for number, (name, waits) in enumerate(seen) if name == "all_gather_into_tensor"]
        assert gathers, "the weights are gathered"
        assert {name for name, _ in seen[gathers[0] :]} == {"all_gather_into_tensor"}
        assert seen[gathers[0]][1], "beside the next step"
        assert ("all_reduce", False) in seen[: gathers[0]], "loss, requests, routers and the norm"


def gatherings(*words: str) -> list[int]:
    """How many gatherings are in flight after a step, and when the weights are rounded again, as after loading a checkpoint."""
    config, mine = trainer(*MOE, *words)
    mine.train(*share_of(mine, *text(config, 0)), [False], 0)
    found = []

    def count(*_: Any) -> None:
        found.append(sum(flat._work is not None for flat in mine.engine._gatherer.order))

    count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", count)
        mine.engine.round_weights()
    return found


def test_partitions_that_are_gathered_are_not_overwritten(worlds) -> None:
    for before, then in worlds(2).run(gatherings, "parallel.zero_stage=1"):
        assert before > 0
        assert then == 0
