"""The host's work in a training step depends neither on the number of ranks nor, in the optimizer, on the number of buckets."""

import gc
import sys
from collections import Counter

import pytest
import torch

from pipeline.config.layout import Layout
from pipeline.parallel import mesh as meshes
from pipeline.training.trainer import Trainer
from tests.world import causal, configured, tiny

SIZES = ("model=llama-tiny", "model.ffn_hidden=64", "model.kv_heads=2", "training.micro_batch_size=1")


def rank_0(world_size, *settings):
    """The trainer of rank 0 of a job of which no other rank exists, and its share of a batch: two micro-batches."""
    device = meshes.init_rehearsed(0, world_size)
    sharing = world_size // configured(*tiny(*SIZES, *settings)).parallel.tensor
    config = configured(*tiny(*SIZES, f"training.global_batch_size={2 * sharing}", *settings))
    trainer = Trainer(config, meshes.build_mesh(Layout.of(config, world_size), device))
    return trainer, causal(torch.arange(2 * 9).remainder(67).view(2, 9))


def calls_of_a_step(world_size, *settings):
    """Calls of functions of Python and C in the third step, by name."""
    trainer, share = rank_0(world_size, *settings)
    calls = Counter()

    def count(frame, event, argument):
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[f"C: {argument.__qualname__}"] += 1

    try:
        for _ in range(2):
            trainer.train(*share)
        gc.collect()
        gc.disable()  # it would call destructors
        sys.setprofile(count)
        trainer.train(*share)
    finally:
        sys.setprofile(None)
        gc.enable()
        meshes.destroy_process_group()
    return calls


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("parallel.zero_stage=1",), marks=pytest.mark.long),
        ("parallel.zero_stage=3",),
        pytest.param(("parallel.zero_stage=2", "parallel.tensor=2"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_a_step_calls_no_function_more_often_in_a_job_of_512_ranks_than_of_8(settings):
    """Less often is possible: a rank of 512 has no part of a small bucket."""
    small, large = (calls_of_a_step(ranks, "model.layers=2", *settings) for ranks in (8, 512))
    assert sum(small.values()) > 1000
    assert {name: (small[name], large[name]) for name in small | large if small[name] < large[name]} == {}
    assert sum(small.values()) - sum(large.values()) < 0.02 * sum(small.values())


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 1, 3])
def test_one_call_of_the_optimizer_updates_all_partitions(stage):
    """One fused kernel for the decayed and one for the other weights, however many buckets there are."""
    found = []
    for layers in (2, 6):
        trainer, share = rank_0(8, f"model.layers={layers}", f"parallel.zero_stage={stage}")
        try:
            trainer.train(*share)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                trainer.train(*share)
        finally:
            meshes.destroy_process_group()
        names = Counter(event.name for event in profile.events())
        found.append((names["aten::_fused_adamw_"], sum(name.startswith("Optimizer.step") for name in names.elements())))
    assert found == [(2, 1), (2, 1)]
