"""Inputs of blocks in host memory: what stays on the device after the forward pass, and the gradients of the same run without it."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipeline.parallel import activation_offload
from tests.world import tiny, trainer

BLOCKS, MICRO_BATCHES = 3, 2
MIXTRAL, LLAMA = ("model=mixtral-tiny",), ("model=llama-tiny", "model.ffn_hidden=48", "model.kv_heads=2")


def inputs_and_gradients(model: tuple[str, ...], mode: str, compiled: bool) -> tuple[list[list[bool]], list[Tensor]]:
    """For each micro-batch which inputs of blocks are on the device after all forward passes, and the gradients of the blocks.

    The forward passes of all micro-batches come first, as on a pipeline.
    """
    torch._dynamo.reset()
    words = (f"model.layers={BLOCKS}", "parallel.zero_stage=0", f"training.activation_checkpointing={mode}")
    compile_block = partial(nn.Module.compile, backend="aot_eager")
    with mock.patch.object(nn.Module, "compile", lambda block: compile_block(block)):
        _, mine = trainer(*tiny(*model, *words, f"training.compile={'on' if compiled else 'off'}"))
    stage = next(mine.model.stage_modules())
    context, generator = stage.attention_context({}), torch.Generator().manual_seed(0)
    inputs: list[list[StorageWeakRef]] = []
    outputs = []
    for _ in range(MICRO_BATCHES):
        x, found = torch.randn(2, 8, 32, generator=generator, requires_grad=True) * 1, []
        for block in stage.blocks.values():
            found.append(StorageWeakRef(x.untyped_storage()))
            x = block(x, context)
        outputs.append(x)
        inputs.append(found)
    there = [[not x.expired() for x in found] for found in inputs]
    weights = [weight for block in stage.blocks.values() for weight in block.parameters()]
    gradients = [gradient for y in outputs for gradient in torch.autograd.grad(y.square().sum(), weights, allow_unused=True)]
    return there, [gradient for gradient in gradients if gradient is not None]


def inputs_without_use() -> tuple[int, int]:
    """How many inputs are fetched in the backward pass of a model whose first two blocks are frozen, and how many of them stay unused."""
    words = ("model.layers=4", "parallel.zero_stage=0", "training.activation_checkpointing=offload", "training.compile=off")
    _, mine = trainer(*tiny(*LLAMA, *words, "training.frozen=[embed.*,blocks.0.*,blocks.1.*]"))
    stage = next(mine.model.stage_modules())
    fetched: list[activation_offload._Input] = []
    with mock.patch.object(
        activation_offload._Input, "bring", lambda self, bring=activation_offload._Input.bring: (fetched.append(self), bring(self))
    ):
        x = torch.randn(2, 8, 32)
        stage.run_blocks(x, stage.attention_context({})).square().sum().backward()
    return len(set(fetched)), sum(item._x is not None for item in set(fetched))


def test_nothing_is_fetched_for_frozen_blocks(worlds):
    """Its memory would be free while it is copied to."""
    assert worlds(1).run(inputs_without_use) == [(2, 0)]


@pytest.mark.parametrize(("model", "compiled"), [(LLAMA, False), (LLAMA, True), (MIXTRAL, False)], ids=["eager", "compiled", "experts"])
def test_only_the_last_input_stays_on_the_device(worlds, model, compiled):
    ((there, expected),) = worlds(1).run(inputs_and_gradients, model, "full", compiled)
    assert there == [[True] * BLOCKS] * MICRO_BATCHES
    ((there, gradients),) = worlds(1).run(inputs_and_gradients, model, "offload", compiled)
    last = [False] * (BLOCKS - 1) + [True]
    assert there == [[False] * BLOCKS] * (MICRO_BATCHES - 1) + [last]
    assert len(gradients) > BLOCKS
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
