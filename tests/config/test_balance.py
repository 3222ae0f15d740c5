"""Blocks of pipeline stages: by FLOPs, the largest stage is as small as possible; given numbers must match the model."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config import layout
from pipeline.config.balance import balanced
from pipeline.config.rules import check
from pipeline.models.registry import family_of
from tests.world import configured

COST = st.integers(0, 20)


@settings(deadline=None)
@given(COST, st.lists(st.integers(1, 20), min_size=1, max_size=8), COST, st.integers(1, 4))
def test_the_largest_stage_is_as_small_as_possible(first, blocks, last, stages):
    stages = min(stages, len(blocks))

    def largest(sizes):
        ends = [sum(sizes[:stage]) for stage in range(stages + 1)]
        costs = [sum(blocks[start:stop]) for start, stop in pairwise(ends)]
        costs[0] += first
        costs[-1] += last
        return max(costs)

    def sizes_of(cuts):
        return [stop - start for start, stop in zip((0, *cuts), (*cuts, len(blocks)), strict=True)]

    sizes = balanced(first, tuple(blocks), last, stages)
    assert len(sizes) == stages
    assert sum(sizes) == len(blocks)
    assert min(sizes) >= 1
    possible = [sizes_of(cuts) for cuts in combinations(range(1, len(blocks)), stages - 1)]
    best = min(map(largest, possible))
    assert largest(sizes) == best
    assert sum(n * n for n in sizes) == min(sum(n * n for n in each) for each in possible if largest(each) == best)


def blocks_of(*overrides):
    config = configured("stage=pretrain", *overrides)
    return config, layout.blocks_per_stage(config)


@pytest.mark.parametrize("pipeline, expected", [(4, [19, 20, 20, 21]), (16, [4, *[5] * 14, 6])])
def test_the_head_of_llama3_70b_counts(pipeline, expected):
    """Its head of 128,256 tokens has the FLOPs of about 1.1 blocks, and so the last stage has fewer blocks."""
    length = "training.sequence_length=8192"
    config, sizes = blocks_of("model=llama3-70b", length, f"parallel.pipeline={pipeline}", "parallel.balance=flops")
    assert sorted(sizes) == expected
    assert sizes[-1] == min(sizes)
    costs = family_of(config.model).costs_per_token(config.model, config.training.sequence_length)
    even = 80 // pipeline * costs.blocks[0] + costs.last
    assert max(max(sizes) * costs.blocks[0], sizes[-1] * costs.blocks[0] + costs.last) < even


def test_equal_numbers_are_the_default_and_given_numbers_replace_them():
    assert blocks_of("model=llama-tiny", "model.layers=8", "parallel.pipeline=4")[1] == ()
    given_numbers = "parallel.layers_per_stage=[3,2,2,1]"
    assert blocks_of("model=llama-tiny", "model.layers=8", "parallel.pipeline=4", given_numbers)[1] == (3, 2, 2, 1)
    assert blocks_of("model=llama-tiny", "parallel.balance=flops")[1] == ()


@pytest.mark.parametrize(
    "numbers, words",
    [
        ("[4,4]", "parallel.layers_per_stage=[4,4]: has 2 stages; the pipeline has 4"),
        ("[3,2,2,2]", "parallel.layers_per_stage=[3,2,2,2]: has 9 layers; the model has model.layers=8"),
        ("[4,4,0,0]", "must be at least 1"),
    ],
)
def test_numbers_that_do_not_match_are_refused(numbers, words):
    config = configured(
        "stage=pretrain", "model=llama-tiny", "model.layers=8", "parallel.pipeline=4", f"parallel.layers_per_stage={numbers}"
    )
    with pytest.raises(UserError) as raised:
        check.check(config, 4)
    assert words in str(raised.value)
