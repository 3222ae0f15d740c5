"""DPO: training in a layout equals a plain loop over separate sequences; the reference is the model without adapters."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.data.load.objectives.supervised import Preferences
from pipeline.layers.loss import IGNORE
from tests.layers.preference_losses import expected_losses
from tests.training.expected import train_plain
from tests.training.test_lora import initialized, settings
from tests.world import configured, in_layout, share_of, trainer

STEPS, BETA, MARGIN = 3, 0.5, 0.3
DPO = ("training.objective=dpo", f"training.dpo_beta={BETA}")


def pairs(config: Any, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Random pairs: each answer and its prompt take a half of the row; the last pair has no targets, but in the MoE model."""
    generator = torch.Generator().manual_seed(step)
    rows, half = config.training.global_batch_size, config.training.sequence_length // 2
    text = torch.randint(config.model.vocab_size, (rows, 2, half + 1), generator=generator)
    targets = text[..., 1:].clone()
    targets[..., : half // 2] = IGNORE
    if not getattr(config.model, "experts", 0):  # the plain loop averages their loss over micro-batches
        targets[-1] = IGNORE
    documents = torch.arange(2 * half).div(half, rounding_mode="floor").expand(rows, -1)
    positions = (torch.arange(2 * half) % half).expand(rows, -1).contiguous()
    batch = {"targets": targets.flatten(1), "documents": documents.int(), "positions": positions, "choices": 1 - 2 * documents}
    return text[..., :-1].flatten(1), batch


class Plain(nn.Module):
    """The loss in plain PyTorch: answers are sequences of their own. The reference is a copy of the initial model."""

    def __init__(self, model: nn.Module, kind: str = "sigmoid") -> None:
        super().__init__()
        self.model, self.kind = model, kind
        self._initial = [copy.deepcopy(model)]  # no submodule: it is not trained
        self.rewards: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        targets = batch["targets"].view(-1, tokens.shape[1] // 2)

        def answers(model: nn.Module) -> torch.Tensor:
            logits = model(tokens.view(targets.shape))
            values = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none").view(targets.shape)
            return -values.sum(1).view(-1, 2)

        with torch.no_grad():
            initial = answers(self._initial[0])
        valid = (batch["targets"] != IGNORE).any(1)
        lengths = (targets != IGNORE).sum(1).view(-1, 2)[valid]
        losses, rewards = expected_losses(self.kind, answers(self.model)[valid], initial[valid], lengths, BETA, MARGIN)
        if torch.is_grad_enabled():
            self.rewards.append(rewards.detach())
        return losses.mean()


@functools.cache
def reference(name: str, kind: str = "sigmoid", *more: str) -> list[tuple[float, ...]]:
    """Loss and gradient norm of each step; the means of both rewards, of their difference and of its sign."""
    config = configured(*settings(name, *DPO, *more))
    model = Plain(initialized(config), kind)
    if config.lora.rank == 0:
        model.requires_grad_()
    numbers = train_plain(config, [pairs(config, step) for step in range(STEPS)], model=model, own_loss=True).numbers
    rewards = torch.cat(model.rewards).view(STEPS, -1, 2)
    return [
        (*each[:2], *pair.mean(dim=0).tolist(), float(margin.mean()), float((margin > 0).float().mean()))
        for each, pair, margin in zip(numbers, rewards, rewards[..., 0] - rewards[..., 1], strict=True)
    ]


def train(name: str, layout: str, *more: str) -> list[tuple[float, ...]]:
    config, mine = trainer(*settings(name, *DPO, *in_layout(layout), *more))
    numbers = []
    stored = [answers(mine, *pairs(config, step)) for step in range(STEPS)] if config.stores_reference else []
    for step in range(STEPS):
        tokens, batch = pairs(config, step)
        if stored:
            batch["reference"] = stored[step]
        tokens, batch = share_of(mine, tokens, batch)
        losses, counts = mine.evaluate(tokens, batch)
        measured = mine.measured(4)
        loss, result = mine.train(tokens, batch, step=step)
        assert int(counts.sum()) == config.training.global_batch_size - (name == "llama")
        torch.testing.assert_close(losses.sum() / counts.sum(), loss, check_dtype=False)
        rewards = (result.more[f"rewards_{kind}"] for kind in ("chosen", "rejected", "margin", "accuracy"))
        numbers.append((float(loss), float(result.gradient_norm), *map(float, rewards)))
        evaluated = Preferences.measures(None, measured.double().numpy())
        assert list(evaluated.values()) == pytest.approx(numbers[-1][2:], abs=1e-6)
    return numbers


def answers(mine: Any, tokens: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log-probabilities of the answers of a global batch under the weights of a trainer, as data that has been read."""
    return mine.answers(*share_of(mine, tokens, batch), full=False).float()


LAYOUTS = [
    ("llama", "zero_stage=1 tensor=2"),
    pytest.param("llama", "zero_stage=3", marks=pytest.mark.long),
    pytest.param("llama", "zero_stage=0 pipeline=2 training.activation_checkpointing=full", marks=pytest.mark.long),
    pytest.param("llama", "zero_stage=0 pipeline=2 schedule=zbv", marks=pytest.mark.long),
    pytest.param("mixtral", "zero_stage=1 expert=2", marks=pytest.mark.long),
]


@pytest.mark.parametrize("name, layout", LAYOUTS)
def test_two_ranks_equal_a_plain_loop(worlds, name, layout):
    expected = torch.tensor(reference(name))
    assert expected[0, 0] == pytest.approx(math.log(2), rel=1e-6)
    assert (expected[1:, 0] - math.log(2)).abs().max() > 1e-4, "adapters would not show"
    for found in worlds(2).run(train, name, layout):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)


ALL_WEIGHTS = ("lora.rank=0", f"training.simpo_margin={MARGIN}", "optimizer.lr=0.002")
LOSSES = [
    pytest.param("llama", "sigmoid", "zero_stage=1 tensor=2", marks=pytest.mark.long),
    pytest.param("llama", "sigmoid_norm", "zero_stage=3", marks=pytest.mark.long),
    pytest.param("llama", "ipo", "zero_stage=0 pipeline=2 schedule=zbv", marks=pytest.mark.long),
    pytest.param("llama", "hinge", "zero_stage=2", marks=pytest.mark.long),
    ("mixtral", "simpo", "zero_stage=1 expert=2"),
    ("llama", "orpo", "zero_stage=0 pipeline=2"),
]


@pytest.mark.parametrize("name, kind, layout", LOSSES)
def test_all_weights_learn_by_every_loss(worlds, name, kind, layout):
    """The reference is what the weights gave before the first step, of which only the log-probabilities are kept."""
    more = (*ALL_WEIGHTS, f"training.preference_loss={kind}")
    expected = torch.tensor(reference(name, kind, *more))
    assert (expected[1:, 0] - expected[0, 0]).abs().max() > 1e-4, "training would not show"
    for found in worlds(2).run(train, name, layout, *more):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)


def test_models_with_a_head_of_their_own_have_this_loss():
    """DeepSeek's head has its MTP modules; without a reference, the answers' log-probabilities are returned."""
    config = configured(*settings("deepseek-grouped", "model.mtp_depth=0", *DPO))
    model = initialized(config)
    tokens, batch = pairs(config, 0)
    with torch.no_grad():
        answers = model(tokens, **batch)
        assert answers.shape == (len(tokens), 2)
        loss = model(tokens, **batch, reference=answers)
    assert float(loss) == pytest.approx(math.log(2))
    assert model.measured[0].tolist() == [0.0, 0.0, 0.0, len(tokens)]
