"""Context parallelism: packed examples of fine-tuning train as in one process, and what is not supported is refused.

Training on other data: test_layouts.py.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.rules import check
from pipeline.layers.loss import IGNORE
from tests.training.expected import Batch, train_plain
from tests.training.layouts import MODELS, STEPS
from tests.world import configured, mean_loss, share_of, tiny, trainer

TUNED = ("stage=finetune", "training.objective=supervised", "data.instructions.train=[unread.jsonl]", "optimizer.schedule=constant")


def examples(config: Any, step: int) -> Batch:
    """Packed examples as Supervised.arrays gives them: two to four in a sequence, the first half of each a prompt, padding at the end."""
    chance = torch.Generator().manual_seed(step)
    rows, length = config.training.global_batch_size, config.training.sequence_length
    tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=chance)
    targets = torch.full((rows, length), IGNORE)
    documents, positions = torch.full((rows, length), -1, dtype=torch.int32), torch.zeros(rows, length, dtype=torch.int64)
    for row in range(rows):
        ends = sorted(torch.randperm(length - 3, generator=chance)[: 2 + row % 3].add(3).tolist())
        for number, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            answer = slice((first + last) // 2, last)
            targets[row, answer] = tokens[row, answer.start + 1 : last + 1]
            documents[row, first:last], positions[row, first:last] = number, torch.arange(last - first)
    return tokens[:, :-1], {"targets": targets, "documents": documents, "positions": positions}


def train(name: str, words: tuple[str, ...]) -> list[tuple[float, float, float]]:
    """Validation loss, loss and gradient norm of every step."""
    config, mine = trainer(*tiny(*MODELS[name].overrides, *TUNED, *words))
    numbers = []
    for step in range(STEPS):
        tokens, batch = share_of(mine, *examples(config, step))
        validated = float(mean_loss(mine, tokens, batch))
        loss, result = mine.train(tokens, batch, step=step)
        numbers.append((validated, float(loss), float(result.gradient_norm)))
    return numbers


@functools.cache
def reference(name: str) -> list[tuple[float, float, float]]:
    config = configured(*tiny(*MODELS[name].overrides, *TUNED))
    plain = train_plain(config, [examples(config, step) for step in range(STEPS)])
    return [(validated, *numbers[:2]) for validated, numbers in zip(plain.validated, plain.numbers, strict=True)]


@pytest.mark.parametrize(
    "name, words",
    [
        ("llama", ("parallel.context_kind=ring",)),
        pytest.param("gpt", ("parallel.context_kind=ulysses",), marks=pytest.mark.long),
        pytest.param("bloom", ("parallel.context_kind=ring",), marks=pytest.mark.long),
        ("mistral", ("parallel.context_kind=ulysses", "parallel.zero_stage=3")),
    ],
)
def test_packed_examples_equal_a_plain_loop(worlds, name, words):
    """Rotary, learned and ALiBi positions that begin at 0 in every example, and a window: the shards of an example are on both ranks."""
    expected = torch.tensor(reference(name))
    for found in worlds(2).run(train, name, ("parallel.context=2", *words)):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0)


def test_positions_matter():
    """The reference would show positions that are counted from the begin of the sequence."""
    config = configured(*tiny(*MODELS["gpt"].overrides, *TUNED))
    tokens, batch = examples(config, 0)
    del batch["positions"]
    assert train_plain(config, [(tokens, batch)]).validated[0] != pytest.approx(reference("gpt")[0][0], rel=1e-4)


REFUSED = [
    (["training.sequence_length=36"], ["training.sequence_length=36", "2 x parallel.context=4", "multiple of 8"]),
    (["parallel.tensor=2", "training.sequence_length=24"], ["parallel.tensor=2", "multiple of 16"]),
    (["training.sequence_warmup=[{until_step: 2, value: 12}]"], ["training.sequence_warmup.0.value=12", "multiple of 8"]),
    (["parallel.context_kind=ulysses", "model.kv_heads=2"], ["parallel.context=4", "model.kv_heads=2", "context_kind=ring"]),
    (["parallel.context_kind=ulysses", "parallel.tensor=2"], ["parallel.context=4", "model.kv_heads=4 / parallel.tensor=2"]),
    (["model=bert-tiny"], ["parallel.context=4", "model.family=bert"]),
]


@pytest.mark.parametrize("arguments, said", REFUSED)
def test_unsupported_combinations_are_refused(arguments, said):
    given = {word.partition("=")[0]: word for word in ("model=llama-tiny", "training.sequence_length=32", *arguments)}
    with pytest.raises(UserError) as raised:
        check.check(configured("stage=pretrain", "parallel.context=4", *given.values()), 8)
    assert all(text in str(raised.value) for text in [*said, "fix:"])
