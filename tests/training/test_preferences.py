"""DPO: training in a layout equals a plain loop over separate sequences; the reference is the model without adapters."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.layers.lora import without_adapters
from pipeline.layers.loss import IGNORE
from tests.training.plain_loop import plain_loop
from tests.training.test_lora import initialized, settings
from tests.world import configured, share, trainer

STEPS, BETA = 3, 0.5
DPO = ("training.objective=dpo", f"training.dpo_beta={BETA}")


def pairs(config: Any, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Random pairs: each answer and its prompt take a half of the row; the last pair has no targets."""
    generator = torch.Generator().manual_seed(step)
    rows, half = config.training.global_batch_size, config.training.sequence_length // 2
    text = torch.randint(config.model.vocab_size, (rows, 2, half + 1), generator=generator)
    targets = text[..., 1:].clone()
    targets[..., : half // 2] = IGNORE
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

    def forward(self, tokens: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        targets = batch["targets"].view(-1, tokens.shape[1] // 2)

        def margins() -> torch.Tensor:
            logits = self.model(tokens.view(targets.shape))
            values = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none").view(targets.shape)
            return -values.sum(1).view(-1, 2).diff(dim=1).neg().squeeze(1)

        with torch.no_grad(), without_adapters(self.model):
            reference = margins()
        valid = (batch["targets"] != IGNORE).any(1)
        return -F.logsigmoid(BETA * (margins() - reference))[valid].mean()


@functools.cache
def reference() -> list[tuple[float, ...]]:
    config = configured(*settings("llama", *DPO))
    return plain_loop(config, [pairs(config, step) for step in range(STEPS)], own_loss=True, model=Plain(initialized(config))).numbers


def train(layout: str) -> tuple[list[tuple[float, float]], float]:
    words = [word if word.startswith("training.") else f"parallel.{word}" for word in layout.split()]
    config, mine = trainer(*settings("llama", *DPO, *words))
    numbers = []
    for step in range(STEPS):
        tokens, batch = pairs(config, step)
        tokens, *values = share(mine, tokens, *batch.values())
        validated, count = mine.evaluate(tokens, dict(zip(batch, values, strict=True)))
        loss, result = mine.train(tokens, dict(zip(batch, values, strict=True)))
        assert int(count) == config.training.global_batch_size - 1
        torch.testing.assert_close(validated, loss)
        numbers.append((float(loss), float(result.gradient_norm)))
    return numbers


LAYOUTS = ["zero_stage=1 tensor=2", "zero_stage=3", "zero_stage=0 pipeline=2 training.activation_checkpointing=full"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_a_plain_loop(worlds, layout):
    expected = torch.tensor(reference())
    assert expected[0, 0] == pytest.approx(math.log(2), rel=1e-6)
    assert (expected[1:, 0] - math.log(2)).abs().max() > 1e-3, "adapters would not show"
    for found in worlds(2).run(train, layout):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-7)
