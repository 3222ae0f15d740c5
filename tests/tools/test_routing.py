"""tools/routing: which selections of experts differ by rounding, and that a defect is not taken for rounding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipeline.layers.router import Router
from tests.world import configured
from tools.audit import routing

TINY = (
    "stage=pretrain", "model=deepseek-tiny", "precision=fp32", "model.hidden=32", "model.heads=4", "model.ffn_hidden=32", "model.layers=2",
    "model.vocab_size=67", "model.max_positions=16", "training.sequence_length=8", "training.global_batch_size=8",
    "training.micro_batch_size=2", "training.steps=5", "optimizer.warmup_steps=1", "optimizer.lr=0.001", "optimizer.eps=1e-6",
)  # fmt: skip


def train(overrides: tuple[str, ...], world_size: int, replay: routing.Run | None, spoil: bool) -> routing.Run:
    return routing.train(configured(*TINY, *overrides), world_size, replay, spoil=spoil)


@pytest.mark.parametrize("top_k, groups, topk_group", [(2, 1, 1), (2, 4, 2), (3, 2, 1), (1, 8, 3)])
def test_smallest_change(top_k, groups, topk_group):
    """Changes of less never select other experts; changes of twice as much to both sides of the closest pair do, for some tokens."""
    generator = torch.Generator().manual_seed(0)
    router = Router(4, 8, top_k, groups=groups, topk_group=topk_group)
    scores = torch.rand(500, 8, generator=generator, dtype=torch.float64)
    change = routing.smallest_change(scores, top_k, groups, topk_group)
    selected = router._select_experts(scores).sort(dim=1).values
    for factor, may_differ in ((0.99, False), (2.0, True)):
        differ = torch.zeros(500, dtype=torch.bool)
        for _ in range(20):
            signs = torch.randint(2, scores.shape, generator=generator) * 2 - 1
            changed = scores + factor * change.unsqueeze(1) * signs
            differ |= (router._select_experts(changed).sort(dim=1).values != selected).any(dim=1)
        assert bool(differ.any()) == may_differ


def test_a_tie_is_found_with_its_margin():
    scores = torch.tensor([[[0.5, 0.3, 0.1], [0.4, 0.3, 0.2999]]])
    others = scores + torch.tensor([0.0, -0.001, 0.001])
    runs = [
        routing.Run([0.0], [0.0], {"router": routing.Selections(values, own, own)}, {})
        for values, own in ((scores, torch.tensor([[[0, 1], [0, 1]]])), (others, torch.tensor([[[0, 1], [0, 2]]])))
    ]
    (tie,) = routing.ties(*runs, SimpleNamespace(top_k=2, groups=1, topk_group=1))
    assert (tie.step, tie.token, tie.experts) == (1, 1, ([0, 1], [0, 2]))
    assert tie.margin == pytest.approx(0.00005, rel=1e-2)
    assert tie.difference == pytest.approx(0.001, rel=1e-2)


@pytest.mark.world
@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.long
def test_a_replay_equals_the_layout_unless_a_bias_was_moved(worlds, spoil):
    run = worlds(4).run(train, ("parallel.tensor=2", "parallel.expert=2"), 4, None, spoil)[0]
    (replay,) = worlds(1).run(train, (), 1, run, False)
    assert len(run.selections) == 2, "one block with experts and one MTP module"
    assert all(torch.equal(run.selections[name].experts, replay.selections[name].experts) for name in run.selections)
    assert routing.relative_difference(replay.losses, run.losses) < 1e-5
    assert (routing.differing_biases(replay, run) == 0) != spoil
    assert (routing.largest_score_difference(replay, run) < 1e-5) != spoil
