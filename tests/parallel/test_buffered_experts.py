"""Experts whose rows travel in buffers: no layer waits for numbers of rows, and a step that does not fit is computed again."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from pipeline.layers.token_permutation import buffer_slots, sorted_slots
from tests.parallel.test_compile import BLOCKS, MICRO_BATCHES, compiled_run
from tests.parallel.test_compile import MIXTRAL as COMPILED
from tests.parallel.test_expert import DEEPSEEK, MIXTRAL, host_reads
from tests.training.layouts import text
from tests.training.test_pretrain import EXACT, lines, run
from tests.world import share_of, tiny, trainer, unsharded

TINY = tiny("model.layers=2", "model.ffn_hidden=24", "training.steps=3", "optimizer.gradient_clipping=0.5", "training.global_batch_size=8")
BUFFERS = "parallel.expert_padding=true"


@pytest.mark.parametrize(("buffers", "rows", "parts"), [(1, 30, 1), (2, 8, 2), (4, 6, 3), (4, 4, 2)])
def test_rows_are_sorted_by_expert_in_each_part_of_each_buffer(buffers, rows, parts):
    """Tokens 2 and 7 are padding, of no expert; and no expert has rows twice, or in another order than that of the tokens."""
    experts, size = 8, rows // parts
    expert_ids = torch.rand(13, experts, generator=torch.Generator().manual_seed(0)).argsort(dim=1)[:, :2]
    expert_ids[[2, 7]] = experts
    flat, slots = expert_ids.flatten().tolist(), buffer_slots(expert_ids, experts, buffers, rows, parts)
    expected = {}
    for buffer in range(buffers):
        own = range(buffer * experts // buffers, (buffer + 1) * experts // buffers)
        ordered = [number for expert in own for number, chosen in enumerate(flat) if chosen == expert]
        for row, number in enumerate(ordered[:rows]):
            expected[number] = (row % parts * buffers + buffer) * size + row // parts
    assert slots.slot.tolist() == [expected.get(number, buffers * rows) for number in range(len(flat))]
    assert {int(slots.assignment[slot]): slot for slot in expected.values()} == expected
    assert (slots.assignment == len(flat)).sum() == buffers * rows - len(expected)
    counts = [[0] * experts for _ in range(parts)]
    for number, slot in expected.items():
        counts[slot // (buffers * size)][flat[number]] += 1
    assert slots.counts.tolist() == counts
    received = sorted_slots(slots.counts[0].view(buffers, -1), size)  # as if a rank got the first part of all buffers
    held = [flat[number] % (experts // buffers) for number in slots.assignment[: buffers * size].tolist() if number < len(flat)]
    order = received.assignment[: len(held)].tolist()
    chosen = [flat[int(slots.assignment[row])] % (experts // buffers) for row in order]
    assert chosen == sorted(held)
    assert [received.slot[row].item() for row in order] == list(range(len(held)))
    assert received.counts.tolist() == [held.count(expert) for expert in range(experts // buffers)]


def _train(overrides, skewed=False):
    """Numbers and final weights of three steps, and how often the host reads numbers of rows; products are those of the grouped kernel.

    If skewed, all tokens are of the same experts.
    """
    config, mine = trainer(*TINY, *overrides)
    numbers = []
    grouped = mock.patch("pipeline.layers.expert_products.has_grouped_kernel", return_value=True)
    first = lambda router, scores: torch.arange(router.top_k).expand(len(scores), -1).contiguous()  # noqa: E731
    same = mock.patch("pipeline.layers.router.Router._select_experts", first) if skewed else nullcontext()
    with host_reads() as reads, grouped, same:
        for step in range(3):
            loss, result = mine.train(*share_of(mine, *text(config, step)), step=step)
            numbers.append({"loss": float(loss), "norm": float(result.gradient_norm), **{k: float(v) for k, v in result.more.items()}})
    return numbers, unsharded(mine), len(reads)


@pytest.mark.parametrize(
    "layout",
    [
        (*DEEPSEEK, "parallel.expert=2", "parallel.pipeline=2", "training.activation_checkpointing=full"),
        *(
            pytest.param(layout, marks=pytest.mark.long)
            for layout in (
                (*MIXTRAL, "parallel.expert=4", "parallel.zero_stage=3", "parallel.expert_parts=2"),
                (*MIXTRAL, "parallel.expert=2", "parallel.tensor=2", "training.activation_checkpointing=selective"),
                (*DEEPSEEK, "parallel.expert=2", "parallel.tensor=2", "parallel.expert_tensor=1", "training.micro_batch_size=1"),
                (*MIXTRAL, "parallel.expert=2", "parallel.zero_stage=1", "precision=fp16", "optimizer.qk_clip=0.01"),
            )
        ),
    ],
)
def test_steps_are_those_that_wait_for_the_numbers_of_rows(world, layout):
    """Of buffers that are large enough, up to rounding; of the smallest ones, and of tokens of the same experts, exactly."""
    waiting = tuple(word for word in layout if not word.startswith("parallel.expert_parts"))
    expected, weights, waits = world.run(_train, waiting)[-1]
    assert waits > 0
    found, _, reads = world.run(_train, (*layout, BUFFERS, "parallel.expert_buffer=8"))[-1]
    assert reads == 0
    assert [numbers.pop("router_beyond_buffers") for numbers in found] == [0] * 3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    found, same, _ = world.run(_train, (*layout, BUFFERS, "parallel.expert_buffer=1"))[-1]
    assert all(numbers.pop("router_beyond_buffers") > 0 for numbers in found)
    assert found == expected
    found, expected = (world.run(_train, words, True)[-1][0] for words in ((*layout, BUFFERS), waiting))
    assert all(numbers.pop("router_beyond_buffers") > 0 for numbers in found)
    assert found == expected
    assert all(torch.equal(same[name], weight) for name, weight in weights.items())


def _compiled(*overrides):
    def grouped(_):  # not a mock, which breaks graphs
        return True

    with mock.patch("pipeline.layers.expert_products.has_grouped_kernel", grouped):
        return compiled_run(overrides, COMPILED)


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", ["selective", "none"])
def test_blocks_are_compiled_whole(worlds, checkpointing):
    """With experts on two ranks, also after steps that were computed again. The losses are those of blocks that are not compiled."""
    layout = ("parallel.expert=2", "training.global_batch_size=16", "precision=bf16", f"training.activation_checkpointing={checkpointing}")
    losses, graphs, calls, breaks, reasons = worlds(2).run(_compiled, *layout, BUFFERS, "parallel.expert_buffer=8")[0]
    assert breaks == 0, reasons
    assert graphs[1] == graphs[-1], "compiled again after the second step"
    assert {later - earlier for earlier, later in zip([0, *calls], calls, strict=False)} == {BLOCKS * MICRO_BATCHES}
    eager = worlds(2).run(_compiled, *layout, "training.compile=off")[0][0]
    again, _, calls, *_ = worlds(2).run(_compiled, *layout, BUFFERS, "parallel.expert_buffer=1")[0]
    if checkpointing == "selective":
        per_step = {later - earlier for earlier, later in zip([0, *calls], calls, strict=False)}
        assert per_step == {BLOCKS * MICRO_BATCHES}, "the next step is compiled, and computing a step again is not"
    assert losses == pytest.approx(eager, rel=1e-3)
    assert again == pytest.approx(eager, rel=1e-3)


@pytest.mark.long
@pytest.mark.world
def test_metrics_and_a_resumed_run_are_those_that_wait(tokens, tmp_path):
    settings = (
        *("model=mixtral-tiny", "model.layers=2", "parallel.expert=2", "precision=fp32", "optimizer.lr=0.01", f"data.tokens={tokens}"),
        *("optimizer.schedule=constant", "checkpoint.every=2"),
    )
    run(2, *settings, "training.steps=4", f"run_dir={tmp_path}/waiting")
    buffers = (*settings, BUFFERS, "parallel.expert_buffer=1", f"run_dir={tmp_path}/buffers")
    printed = "".join(run(2, *buffers, f"training.steps={steps}") for steps in (2, 4))
    assert printed.count("were beyond the buffers of experts") == 4
    names = (*EXACT, "router_load_max", "router_dropped", "aux_loss")
    ours, theirs = ([[line[key] for key in names] for line in lines(tmp_path / name) if "loss" in line] for name in ("buffers", "waiting"))
    assert ours == theirs
