"""Compiled blocks: no graph break, no block left out, and no compilation after the second step, in what is combined with compilation."""

from unittest import mock

import pytest
from torch import nn

from tests.world import causal, share, tiny, trainer

STEPS, BLOCKS, MICRO_BATCHES = 3, 2, 2
SIZES = (f"model.layers={BLOCKS}", "model.ffn_hidden=48", "model.kv_heads=2", "training.micro_batch_size=4", "training.compile=on")
MODEL = tiny("model=llama-tiny", "training.sequence_length=16", "parallel.zero_stage=0", *SIZES)


def compiled_run(overrides: tuple[str, ...]) -> tuple[list[float], list[int], list[int], int, list[str]]:
    """Train some steps; returns the losses, graphs so far and calls of compiled graphs after each step, graph breaks and their reasons."""
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    calls = 0

    def counting(graph, inputs, **options):
        """Trace forward and backward as for any backend, but do not generate code."""
        run = aot_eager(graph, inputs, **options)

        def counted(*arguments):
            nonlocal calls
            calls += 1
            return run(*arguments)

        return counted

    torch._dynamo.reset()
    counters.clear()
    compile_module = nn.Module.compile
    with mock.patch.object(nn.Module, "compile", lambda module: compile_module(module, backend=counting)):
        config, mine = trainer(*MODEL, *overrides)
    losses, graphs, called = [], [], []
    for step in range(STEPS):
        shape = (config.training.global_batch_size, config.training.sequence_length + 1)
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
        documents = (torch.rand(shape[0], shape[1] - 1, generator=generator) < 0.2).int().cumsum(1, dtype=torch.int32)
        batch = (tokens, documents) if config.training.document_mask else (tokens,)
        losses.append(float(mine.train(*causal(*share(mine, *batch)))[0]))
        graphs.append(counters["stats"]["unique_graphs"])
        called.append(calls)
    return losses, graphs, called, sum(counters["graph_break"].values()), list(counters["graph_break"])


COMBINATIONS = [
    ("training.activation_checkpointing=full",),
    ("training.activation_checkpointing=selective", "parallel.tensor=2", "training.document_mask=true"),
    ("training.activation_checkpointing=full", "parallel.context=2", "training.document_mask=true"),
    ("training.activation_checkpointing=selective", "parallel.context=2"),
    ("training.activation_checkpointing=full", "parallel.context=2", "parallel.context_kind=ulysses"),
    ("training.activation_checkpointing=none", "parallel.tensor=2"),
    ("parallel.zero_stage=1",),
    ("parallel.zero_stage=3", "training.activation_checkpointing=selective"),
]


@pytest.mark.parametrize("overrides", COMBINATIONS, ids=" ".join)
def test_blocks_are_compiled_whole(worlds, overrides):
    replicas = 1 if any("tensor=2" in word or "context=2" in word for word in overrides) else 2
    sizes = (f"training.global_batch_size={4 * MICRO_BATCHES * replicas}",)
    for losses, graphs, calls, breaks, reasons in worlds(2).run(compiled_run, (*overrides, *sizes)):
        assert all(loss == loss and loss < 10 for loss in losses)
        assert breaks == 0, reasons
        assert graphs[0] >= 1
        assert graphs[1] == graphs[-1], "compiled again after the second step"
        per_step = {later - earlier for earlier, later in zip([0, *calls], calls, strict=False)}
        assert per_step == {BLOCKS * MICRO_BATCHES}, "every block of every micro-batch runs one compiled graph"


def test_compilation_of_all_axes_together(worlds):
    """Tensor x context x recomputation, and the losses of the same run without compilation."""
    layout = ("parallel.tensor=2", "parallel.context=2", "training.activation_checkpointing=selective", "training.document_mask=true")
    layout += (f"training.global_batch_size={4 * MICRO_BATCHES}",)
    losses, graphs, _, breaks, reasons = worlds(4).run(compiled_run, layout)[0]
    eager, none, *_ = worlds(4).run(compiled_run, (*layout, "training.compile=off"))[0]
    assert breaks == 0, reasons
    assert graphs[-1] >= 1
    assert none[-1] == 0
    assert losses == pytest.approx(eager, rel=1e-5)
