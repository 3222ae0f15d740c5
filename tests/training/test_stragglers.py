"""Stragglers: which node is slow, and a rank whose clock makes its forward passes long."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.common import events
from pipeline.config.layout import Layout
from pipeline.training.stragglers import SlowNodes, StageTimer, Stragglers
from tests.world import causal, configured, share, tiny, trainer

FOUR = ("parallel.zero_stage=0", "training.global_batch_size=64", "model.layers=4")


def judge(ranks: int, *settings: str, ranks_per_node: int = 1) -> SlowNodes:
    layout = Layout.of(configured(*tiny(*FOUR, *settings)), ranks)
    return SlowNodes(layout, [f"n{rank // ranks_per_node}" for rank in range(ranks)], 1.3)


def test_a_node_is_named_once_in_the_third_interval_and_again_when_it_changes():
    slow = judge(4)
    times = [1.0, 1.1, 1.5, 1.0]
    assert [slow.changed(times) for _ in range(2)] == [None, None]
    assert slow.changed(times) == {"n2": (pytest.approx(1.5 / 1.05), 2)}
    assert slow.changed(times) is None
    assert slow.changed([1.0] * 4) == {}
    assert slow.changed(times) is None, "three intervals again"


def test_one_interval_without_it_begins_the_count_again_and_unknown_times_are_left_out():
    slow = judge(4)
    for times in ([1, 1, 2, 1], [1, 1, 2, 1], [1, 1, 1, 1], [1, 1, 2, 1], [0, 1, 2, 1]):
        assert slow.changed([float(value) for value in times]) is None
    assert slow.changed([0.0, 1.0, 2.0, 1.0]) == {"n2": (2.0, 2)}
    assert judge(4).changed([0.0] * 4) is None


def test_ranks_are_compared_with_those_of_their_pipeline_stage():
    layouts = judge(8, "parallel.pipeline=2")
    stages = [layouts._stages[stage] for stage in (0, 1)]
    times = [0.0] * 8
    for stage, ranks in enumerate(stages):
        for rank in ranks:
            times[rank] = 1.0 + 4 * stage  # the last stage has the head
    assert [layouts.changed(times) for _ in range(3)] == [None] * 3
    times[stages[0][1]] = 1.5
    assert [layouts.changed(times) for _ in range(2)] == [None, None]
    assert layouts.changed(times) == {f"n{stages[0][1]}": (1.5, stages[0][1])}


def test_one_slow_gpu_of_a_node_names_the_node_and_the_rank():
    slow = judge(8, ranks_per_node=4)
    times = [1.0] * 8
    times[6] = 1.6
    assert [slow.changed(times) for _ in range(2)] == [None, None]
    assert slow.changed(times) == {"n1": (1.6, 6)}


def test_a_large_job_has_a_short_message(tmp_path, caplog):
    slow = Stragglers.__new__(Stragglers)
    slow._judge, slow._run_dir = judge(1024, "training.global_batch_size=2048"), tmp_path
    times = [1.0] * 700 + [2.0] * 324
    for step in (10, 20, 30, 40):
        slow._tell(step, type("Copy", (), {"values": lambda _: times})())
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(" and 316 more")
    assert len(caplog.messages[0]) < 500
    (event,) = events.read(tmp_path)
    assert (event["event"], event["step"], event["count"], len(event["nodes"])) == ("straggler", 30, 324, 8)


def train_with_a_slow_rank(run_dir: Path, slow: int, settings: tuple[str, ...]) -> tuple[list[dict[str, Any]], int]:
    """Make seven steps with an exchange every second one; returns the events, and the number of steps whose times are kept."""
    config, own = trainer(*tiny(*settings, f"run_dir={run_dir}", "tracking.log_every=2", "cluster.slow_factor=1.5"))
    ranks = own.mesh.layout.world_size
    watched = Stragglers(config, own, [f"n{rank}" for rank in range(ranks)])
    clock = itertools.accumulate(itertools.repeat(0.15 if own.mesh.rank == slow else 0.02))  # a pass has two readings: begin and end
    tokens, batch = causal(torch.arange(16 * 9).reshape(16, 9) % 67)
    (tokens, targets) = share(own, tokens, batch["targets"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageTimer, "_now", lambda _: next(clock))  # ranks that share cores take any time
        for step in range(1, 8):
            with watched.during_step(step):
                own.train(tokens, {"targets": targets}, (), step - 1)
    return events.read(run_dir), len(watched._timer._pending)


@pytest.mark.world
@pytest.mark.parametrize(
    "ranks, slow, settings",
    [
        (2, 1, ("parallel.zero_stage=2",)),
        pytest.param(4, 2, ("parallel.pipeline=2", "parallel.zero_stage=0", "training.micro_batch_size=4"), marks=pytest.mark.long),
    ],
)
def test_a_slow_rank_is_named(worlds, tmp_path, ranks, slow, settings):
    found, pending = worlds(ranks).run(train_with_a_slow_rank, tmp_path, slow, settings)[0]
    (event,) = found
    assert event["event"] == "straggler"
    assert event["step"] == 6
    assert list(event["nodes"]) == [f"n{slow}"]
    assert pending == 1, "times are forgotten once they are exchanged"
