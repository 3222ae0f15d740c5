"""A training step leaves no tensor in a cycle of references: memory is free at once, though garbage is collected at fixed steps alone."""

from __future__ import annotations

import gc

import pytest
import torch

from pipeline.training import garbage_collection
from tests.helpers import one_in
from tests.training.layouts import MODELS
from tests.world import share_of, tiny, trainer

STEPS = 3


def cyclic_tensors(name: str, *words: str) -> list[tuple[int, ...]]:
    """The shapes of tensors that three steps leave in cycles on this rank."""
    model = MODELS[name]
    config, mine = trainer(*tiny(*model.overrides, *words))
    with garbage_collection.at_fixed_steps():
        for step in range(STEPS):
            mine.train(*share_of(mine, *model.batch(config, step)), [False], step)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = [tuple(each.shape) for each in gc.garbage if isinstance(each, torch.Tensor)]
        gc.garbage.clear()
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    one_in(
        2,
        [
            ("llama", ("parallel.zero_stage=3",)),
            ("llama", ("parallel.pipeline=2",)),
            ("mixtral", ("parallel.expert=2", "parallel.zero_stage=1")),
            ("llama", ("parallel.context=2", "training.activation_checkpointing=full")),
        ],
    ),
    ids=str,
)
def test_a_step_leaves_no_tensor_in_a_cycle(worlds, name: str, words: tuple[str, ...]) -> None:
    assert worlds(2).run(cyclic_tensors, name, *words) == [[], []]


def test_collections_are_at_fixed_steps_alone() -> None:
    assert gc.isenabled()
    with garbage_collection.at_fixed_steps():
        assert not gc.isenabled()
    assert gc.isenabled()
