"""The rules of sampling are those of transformers' logits processors."""

import pytest
import torch
from transformers.generation import logits_process as stock

from pipeline.generation.sampling import Sampling, SeenTokens, choose, distribution, draw

LOGITS = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
HISTORIES = [[1, 2, 2, 7], [0], [*range(50)]]


def seen_by(histories: list[list[int]]) -> torch.Tensor:
    """Of the histories: a prompt, then the last token."""
    seen = SeenTokens()
    for row, history in enumerate(histories):
        seen.begin(row, history[:-1] or history, LOGITS, len(histories))
    seen.add(range(len(histories)), torch.tensor([history[-1] for history in histories]))
    return seen.of(range(len(histories)))


@pytest.mark.parametrize(
    "sampling, processors",
    [
        (Sampling(temperature=0.7), [stock.TemperatureLogitsWarper(0.7)]),
        (Sampling(temperature=1, top_k=5), [stock.TopKLogitsWarper(5)]),
        (Sampling(temperature=1, top_k=500), []),
        (Sampling(temperature=1, top_p=0.8), [stock.TopPLogitsWarper(0.8)]),
        (Sampling(temperature=1, top_p=1e-6), [stock.TopPLogitsWarper(1e-6)]),
        (Sampling(temperature=1, min_p=0.1), [stock.MinPLogitsWarper(0.1)]),
        (
            Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05),
            [stock.TemperatureLogitsWarper(0.9), stock.TopKLogitsWarper(20), stock.TopPLogitsWarper(0.9), stock.MinPLogitsWarper(0.05)],
        ),
    ],
)
def test_distributions_are_those_of_transformers(sampling, processors):
    scores = LOGITS
    for processor in processors:
        scores = processor(None, scores)
    torch.testing.assert_close(distribution(LOGITS, sampling, None), scores.softmax(dim=1))


def test_the_repetition_penalty_is_that_of_transformers():
    penalty = stock.RepetitionPenaltyLogitsProcessor(1.3)
    expected = torch.cat([penalty(torch.tensor([history]), row[None]) for row, history in zip(LOGITS, HISTORIES, strict=True)])
    sampling = Sampling(temperature=1, repetition_penalty=1.3)
    torch.testing.assert_close(distribution(LOGITS, sampling, seen_by(HISTORIES)), expected.softmax(dim=1))
    assert torch.equal(choose(LOGITS, Sampling(repetition_penalty=1.3), seen_by(HISTORIES), []), expected.argmax(dim=1))
    assert torch.equal(choose(LOGITS, Sampling(), None, []), LOGITS.argmax(dim=1))


def test_draws_follow_the_distribution():
    """A token is drawn for its share of the numbers in [0, 1); one of probability zero never, not even at the ends."""
    probabilities = torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25, 0.0]])
    numbers = torch.arange(1000, dtype=torch.float64) / 1000
    counts = draw(probabilities.expand(1000, -1), numbers.tolist()).bincount(minlength=6)
    assert counts.tolist() == [0, 250, 500, 0, 250, 0]
    assert draw(probabilities.expand(2, -1), [0.0, 1 - 2**-53]).tolist() == [1, 4]
