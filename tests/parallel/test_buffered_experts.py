"""Experts whose rows travel in buffers: no layer waits for numbers of rows, and a step that does not fit is computed again."""

from unittest import mock

import pytest
import torch

from tests.parallel.test_expert import DEEPSEEK, MIXTRAL
from tests.world import causal, share, tiny, trainer, unsharded

TINY = tiny("model.layers=2", "model.ffn_hidden=24", "training.steps=3", "optimizer.gradient_clipping=0.5", "training.global_batch_size=8")


def _train(overrides, grouped):
    """Numbers and final weights of three steps, and how often the host reads numbers of rows.

    With `grouped`, products are those of the grouped kernel, which reads the numbers on the device.
    """
    config, mine = trainer(*TINY, *overrides)
    reads, numbers = [], []
    tolist = torch.Tensor.tolist

    def counted(tensor):
        if tensor.dtype in (torch.int32, torch.int64):
            reads.append(len(tensor))
        return tolist(tensor)

    with (
        mock.patch.object(torch.Tensor, "tolist", counted),
        mock.patch("pipeline.layers.expert_products.has_grouped_kernel", lambda _: grouped),
    ):
        for step in range(3):
            tokens = torch.randint(67, (config.training.global_batch_size, 9), generator=torch.Generator().manual_seed(step))
            loss, result = mine.train(*causal(*share(mine, tokens)), step=step)
            numbers.append({"loss": float(loss), "norm": float(result.gradient_norm), **{k: float(v) for k, v in result.more.items()}})
    return numbers, unsharded(mine), len(reads)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    "model, layout",
    [
        (MIXTRAL, ("parallel.expert=4", "parallel.zero_stage=3")),
        (MIXTRAL, ("parallel.expert=2", "parallel.tensor=2", "training.activation_checkpointing=selective")),
        (DEEPSEEK, ("parallel.expert=2", "parallel.pipeline=2", "training.activation_checkpointing=full")),
        (DEEPSEEK, ("parallel.expert=2", "parallel.tensor=2", "parallel.expert_tensor=1", "training.micro_batch_size=1")),
    ],
)
def test_steps_are_those_that_wait_for_the_numbers_of_rows(world, model, layout, grouped):
    """Of buffers that are always large enough, and of the smallest ones, which are not."""
    waiting = world.run(_train, (*model, *layout), grouped)[0]
    again = world.run(_train, (*model, *layout), grouped)[0]
    print("again", again[0] == waiting[0], {n: float((weight - waiting[1][n]).abs().max()) for n, weight in again[1].items() if not torch.equal(weight, waiting[1][n])})
    for factor in (100, 1):
        found, weights, reads = world.run(_train, (*model, *layout, "parallel.expert_padding=true", f"parallel.expert_buffer={factor}"), grouped)[0]
        beyond = [numbers.pop("router_beyond_buffers") for numbers in found]
        print(beyond, reads, waiting[2], [f["loss"] for f in found])
        print(found == waiting[0])
        print({n: float((weight - waiting[1][n]).abs().max()) for n, weight in weights.items() if not torch.equal(weight, waiting[1][n])})
        assert (sum(beyond) > 0) == (factor == 1)
        assert reads == 0 or factor == 1 or not grouped
