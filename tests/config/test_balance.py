"""Blocks of pipeline stages: by FLOPs, the largest stage is as small as possible; given numbers must match the model."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config import layout
from pipeline.config.layout import TOLERANCE, balanced
from pipeline.config.rules import check
from pipeline.models.registry import family_of
from tests.world import configured

COST = st.integers(0, 200)


@settings(deadline=None)
@given(COST, st.lists(st.integers(1, 200), min_size=1, max_size=8), COST, st.integers(1, 4))
def test_the_largest_stage_is_nearly_as_small_as_possible_and_then_the_stages_are_even(first, blocks, last, stages):
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
    allowed = min(map(largest, possible)) * (1 + TOLERANCE)
    assert largest(sizes) <= allowed
    assert sum(n * n for n in sizes) == min(sum(n * n for n in each) for each in possible if largest(each) <= allowed)


def blocks_of(*overrides):
    config = configured("stage=pretrain", *overrides)
    return config, layout.blocks_per_stage(config)


@pytest.mark.parametrize(
    "model, pipeline, expected",
    [
        ("llama3-8b", 2, [17, 15]),
        ("llama3-70b", 4, [20] * 4),
        ("llama3-70b", 16, [5] * 16),
        ("llama3-70b", 40, [2] * 38 + [3, 1]),
        ("deepseek-v3", 16, [4] * 15 + [1]),
    ],
)
def test_the_head_counts(model, pipeline, expected):
    """Llama-3 70B's head of 128,256 tokens has the FLOPs of about 1.1 blocks; DeepSeek-V3's last stage has the further token's block too.

    A block more on some stages would save less than 2 % of the first two cases of 70B, which is not worth its memory.
    """
    config, sizes = blocks_of(f"model={model}", "training.sequence_length=8192", f"parallel.pipeline={pipeline}")
    assert list(sizes) == expected
    costs = family_of(config.model).costs_per_token(config.model, config.training.sequence_length)
    even = len(costs.blocks) // pipeline * max(costs.blocks) + costs.last
    assert max(max(sizes[:-1]) * max(costs.blocks), sum(costs.blocks[-sizes[-1] :]) + costs.last) <= even


def test_equal_numbers_and_given_numbers_replace_it():
    model = ("model=llama-tiny", "model.layers=8", "parallel.pipeline=4")
    assert blocks_of(*model)[1] == (2, 2, 3, 1)
    assert blocks_of(*model, "parallel.balance=layers")[1] == ()
    assert blocks_of(*model, "parallel.layers_per_stage=[3,2,2,1]")[1] == (3, 2, 2, 1)
    assert blocks_of("model=llama-tiny")[1] == ()


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
