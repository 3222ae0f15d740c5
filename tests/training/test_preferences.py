"""DPO: training in a layout equals a plain loop over separate sequences; the reference is the model without adapters."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.data.load.objectives.preferences import Preferences
from pipeline.layers.lora import without_adapters
from pipeline.layers.loss import IGNORE
from tests.training.expected import train_plain
from tests.training.test_lora import initialized, settings
from tests.world import configured, share, trainer

STEPS, BETA = 3, 0.5
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
    """The loss in plain PyTorch: answers are sequences of their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.rewards: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        targets = batch["targets"].view(-1, tokens.shape[1] // 2)

        def answers() -> torch.Tensor:
            logits = self.model(tokens.view(targets.shape))
            values = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none").view(targets.shape)
            return -values.sum(1).view(-1, 2)

        with torch.no_grad(), without_adapters(self.model):
            reference = answers()
        valid = (batch["targets"] != IGNORE).any(1)
        rewards = BETA * (answers() - reference)[valid]
        if torch.is_grad_enabled():
            self.rewards.append(rewards.detach())
        return -F.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()


@functools.cache
def reference(name: str) -> list[tuple[float, ...]]:
    """Loss and gradient norm of each step; the means of both rewards, of their difference and of its sign."""
    config = configured(*settings(name, *DPO))
    model = Plain(initialized(config))
    numbers = train_plain(config, [pairs(config, step) for step in range(STEPS)], model=model, own_loss=True).numbers
    rewards = torch.cat(model.rewards).view(STEPS, -1, 2)
    return [
        (*each[:2], *pair.mean(dim=0).tolist(), float(margin.mean()), float((margin > 0).float().mean()))
        for each, pair, margin in zip(numbers, rewards, rewards[..., 0] - rewards[..., 1], strict=True)
    ]


def train(name: str, layout: str) -> list[tuple[float, ...]]:
    words = [word if word.startswith("training.") else f"parallel.{word}" for word in layout.split()]
    config, mine = trainer(*settings(name, *DPO, *words))
    numbers = []
    for step in range(STEPS):
        tokens, batch = pairs(config, step)
        tokens, *values = share(mine, tokens, *batch.values())
        losses, counts = mine.evaluate(tokens, dict(zip(batch, values, strict=True)))
        measured = mine.measured(4)
        loss, result = mine.train(tokens, dict(zip(batch, values, strict=True)), step=step)
        assert int(counts.sum()) == config.training.global_batch_size - (name == "llama")
        torch.testing.assert_close(losses.sum() / counts.sum(), loss, check_dtype=False)
        rewards = (result.more[f"rewards_{kind}"] for kind in ("chosen", "rejected", "margin", "accuracy"))
        numbers.append((float(loss), float(result.gradient_norm), *map(float, rewards)))
        evaluated = Preferences.measures(None, measured.double().numpy())
        assert list(evaluated.values()) == pytest.approx(numbers[-1][2:], abs=1e-6)
    return numbers


LAYOUTS = [
    ("llama", "zero_stage=1 tensor=2"),
    ("llama", "zero_stage=3"),
    ("llama", "zero_stage=0 pipeline=2 training.activation_checkpointing=full"),
    ("llama", "zero_stage=0 pipeline=2 schedule=zbv"),
    ("mixtral", "zero_stage=1 expert=2"),
]


@pytest.mark.parametrize("name, layout", LAYOUTS)
def test_two_ranks_equal_a_plain_loop(worlds, name, layout):
    expected = torch.tensor(reference(name))
    assert expected[0, 0] == pytest.approx(math.log(2), rel=1e-6)
    assert (expected[1:, 0] - math.log(2)).abs().max() > 1e-4, "adapters would not show"
    for found in worlds(2).run(train, name, layout):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)


def test_models_with_a_head_of_their_own_have_this_loss():
    """DeepSeek's head has its MTP modules; without a reference, the answers' log-probabilities are returned."""
    config = configured(*settings("deepseek-grouped", "model.mtp_depth=0", *DPO))
    model = initialized(config)
    tokens, batch = pairs(config, 0)
    with torch.no_grad():
        answers = model(tokens, **batch)
        assert answers.shape == (len(tokens), 2)
        beta = torch.full((len(tokens), 1), BETA)
        loss = model(tokens, **batch, reference=torch.cat([beta, answers], dim=1))
    assert float(loss) == pytest.approx(math.log(2))
    assert model.measured[0].tolist() == [0.0, 0.0, 0.0, len(tokens)]
