"""The search: legal layouts only, the best of them by exhaustive comparison, and the simulated schedules."""

from __future__ import annotations

import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.hardware import load, with_node
from pipeline.config.layout import Layout
from pipeline.config.rules import check
from pipeline.planner.communication import collective_time, group
from pipeline.planner.pipeline_simulation import StageTime, orders, simulate
from pipeline.planner.plan import plan
from pipeline.planner.search import Traces, best_layout, search
from tests.world import configured

SMALL = ("stage=pretrain", "model=llama-tiny", "training.sequence_length=128", "training.global_batch_size=32")


@pytest.mark.long
def test_the_best_layout_is_legal_fits_and_is_the_fastest_simulated_one(caplog):
    caplog.set_level(logging.INFO, "pipeline")
    config, hardware = configured(*SMALL), with_node(load("a100-40"), gpus_per_node=2)
    traces = Traces()
    found = search(config, 4, hardware, traces)
    reported = [re.fullmatch(r"search: (simulated: )?(\d+) of (\d+) layouts, .* done", line) for line in caplog.messages]
    assert [(bool(line[1]), line[2] == line[3]) for line in reported if line] == [(False, True), (True, True)]
    best = best_layout(config, 2, hardware, traces)
    assert best is not None
    assert best.settings == found.choices[0].settings
    assert all(not check.violations(choice.plan.config, 4) for choice in found.choices)
    assert all(choice.plan.estimate.fits for choice in found.choices)
    assert [c.step_time for c in found.choices] == sorted(c.step_time for c in found.choices)
    front = [choice.plan.estimate.memory.total for choice in found.front]
    assert front == sorted(front, reverse=True)


def test_a_model_that_fits_nowhere_has_no_layout():
    config = configured("stage=pretrain", "model=llama3-8b", "training.sequence_length=128", "training.global_batch_size=2")
    found = search(config, 1, with_node(load("v100-16"), gpus_per_node=1))
    assert not found.choices
    assert found.legal > 0
    assert found.smallest is not None
    assert found.smallest.plan.estimate.memory.total > 17e9


@pytest.mark.parametrize("ranks, micro_batches", [(2, 2), (4, 8), (8, 32)])
def test_1f1b_of_equal_stages_has_the_published_bubble(ranks, micro_batches):
    layout = Layout(ranks, 1, 1, schedule="1f1b", micro_batches=micro_batches)
    time, flight = simulate(layout, [StageTime(1.0, 1.0, 2.0)] * ranks, lambda _: 0.0, [1.0] * ranks)
    assert time == pytest.approx(3.0 * (micro_batches + ranks - 1))
    assert flight == [min(micro_batches, ranks - rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks, chunks, micro_batches", [(2, 2, 4), (4, 2, 16), (4, 3, 8)])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(ranks, chunks, micro_batches):
    layout = Layout(ranks, 1, 1, schedule="interleaved", stages_per_rank=chunks, micro_batches=micro_batches)
    time, _ = simulate(layout, [StageTime(1.0, 1.0, 2.0)] * ranks * chunks, lambda _: 0.0, [1.0] * ranks * chunks)
    assert time == pytest.approx(3.0 * (micro_batches * chunks + ranks - 1))


def test_the_interleaved_order_is_pytorchs():
    from torch.distributed.pipelining import schedules

    ranks, chunks, micro_batches = 4, 2, 8
    reference = schedules.ScheduleInterleaved1F1B.__new__(schedules.ScheduleInterleaved1F1B)
    reference.pp_group_size, reference.n_local_stages, reference._n_microbatches = ranks, chunks, micro_batches
    reference.number_of_rounds, reference.microbatches_per_round = micro_batches // ranks, ranks
    layout = Layout(ranks, 1, 1, schedule="interleaved", stages_per_rank=chunks, micro_batches=micro_batches)
    for rank, order in enumerate(orders(layout, micro_batches)):
        theirs = [action for action in reference._calculate_single_rank_operations(rank) if action is not None]
        assert [(a.computation_type.value[0], a.stage_index, a.microbatch_index) for a in theirs] == order


ONE_SEQUENCE = ("training.sequence_length=4096", "training.micro_batch_size=1", "training.global_batch_size=128")


def test_stages_of_an_interleaved_pipeline_are_reduced_beside_the_others():
    words = ("stage=pretrain", "model=llama3-8b", "parallel.pipeline=4", "parallel.zero_stage=1", *ONE_SEQUENCE)
    hardware = with_node(load("a100-80"), gpus_per_node=8, network_gb_s=2.0)  # slow, so that reductions are seen
    schedules = (("parallel.schedule=1f1b",), ("parallel.schedule=interleaved", "parallel.stages_per_rank=4"))
    plain, interleaved = (plan(configured(*words, *schedule), 64, hardware).estimate.causes["data"] for schedule in schedules)
    assert 0 < interleaved < plain


def test_hidden_collectives_still_cost_a_share_of_their_time():
    config = configured("stage=pretrain", "model=llama3-8b", "parallel.zero_stage=3", *ONE_SEQUENCE)
    networks = [with_node(load("h100"), gpus_per_node=8, network_gb_s=rate) for rate in (50.0, 100.0)]
    times = [plan(config, 64, hardware).estimate.causes["data"] for hardware in networks]
    assert 0 < times[1] < times[0]


def test_zbv_is_faster_than_1f1b():
    stages = [StageTime(1.0, 1.0, 2.0)]
    zbv, _ = simulate(Layout(4, 1, 1, schedule="zbv", stages_per_rank=2, micro_batches=16), stages * 8, lambda _: 0.0, [1.0] * 8)
    plain, _ = simulate(Layout(4, 1, 1, schedule="1f1b", micro_batches=16), [StageTime(2.0, 2.0, 4.0)] * 4, lambda _: 0.0, [1.0] * 4)
    assert 16 * 6.0 <= zbv < plain


@given(size=st.floats(1, 1e10), ranks=st.integers(1, 256), stride=st.sampled_from([1, 2, 8]), node=st.sampled_from([1, 4, 8]))
@settings(deadline=None)
def test_collectives_never_get_faster_with_more_bytes_and_an_all_reduce_is_two_halves(size, ranks, stride, node):
    hardware = with_node(load("a100-80"), gpus_per_node=node)
    where = group(ranks, stride, node)
    assert where.nodes * where.per_node >= ranks
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert collective_time(kind, size, where, hardware) <= collective_time(kind, 2 * size, where, hardware)
    assert collective_time("all_reduce", size, where, hardware) <= 2 * collective_time("all_gather", size, where, hardware)
