"""Choice of the next token: greedy, or from the distribution that temperature, top-k, top-p and min-p leave.

The rules and their order are those of transformers' logits processors.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; each default disables its rule.

    Attributes:
        temperature: divides the logits; 0 chooses the token with the largest logit.
        top_k: number of tokens with the largest logits that are kept; 0 keeps all.
        top_p: the smallest set of the most probable tokens with at least this probability is kept (Holtzman et al. 2020).
        min_p: tokens with at least this fraction of the largest probability are kept (Nguyen et al. 2024).
        repetition_penalty: divides positive and multiplies negative logits of the tokens of prompt and completion (Keskar et al. 2019).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def random(self, index: int) -> random.Random:
        """Return the random numbers of prompt `index`: they depend neither on the batch nor on the number of ranks."""
        return random.Random(f"{self.seed}/{index}")


class SeenTokens:
    """The tokens of prompt and completion of each row, for the repetition penalty: on the device, where each token is marked once."""

    def __init__(self) -> None:
        self._marks = torch.zeros(0, 0, dtype=torch.bool)

    def begin(self, row: int, prompt: Sequence[int], logits: Tensor, rows: int) -> None:
        """Begin with a prompt; logits (any, vocabulary) have the width and the device, and `rows` is the number of all rows."""
        if self._marks.shape != (rows, logits.shape[1]) or self._marks.device != logits.device:
            self._marks = torch.zeros(rows, logits.shape[1], dtype=torch.bool, device=logits.device)
        self._marks[row] = False
        self._marks[row, torch.tensor(prompt, device=logits.device)] = True

    def add(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Add a token to each row; int64 (rows,) on the device."""
        self._marks[torch.tensor(rows, device=self._marks.device), tokens] = True

    def of(self, rows: Sequence[int]) -> Tensor:
        """Return a copy of the marks of some rows, bool (rows, vocabulary)."""
        return self._marks[torch.tensor(rows, device=self._marks.device)]


def choose(logits: Tensor, sampling: Sampling, seen: Tensor | None, uniforms: Sequence[float]) -> Tensor:
    """Choose a token for each sequence.

    Args:
        logits: (batch, vocabulary).
        seen: bool (batch, vocabulary), the tokens of prompt and completion of each sequence; not read without a repetition penalty.
        uniforms: a random number in [0, 1) for each sequence; not read if the temperature is 0.

    Returns:
        int64 (batch,).
    """
    if sampling.temperature == 0:
        return penalize(logits.float(), sampling.repetition_penalty, seen).argmax(dim=1)
    return draw(distribution(logits, sampling, seen), uniforms)


def distribution(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """Return the probabilities that tokens are drawn with, fp32 (batch, vocabulary); arguments as in `choose`.

    With temperature 0, the chosen token has probability 1.
    """
    scores = penalize(logits.float(), sampling.repetition_penalty, seen)
    if sampling.temperature == 0:
        return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=1, keepdim=True), 1.0)
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[1]:
        least = scores.topk(sampling.top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=1)
        excluded = ordered.softmax(dim=1).cumsum(dim=1) <= 1 - sampling.top_p
        excluded[:, -1] = False
        scores = scores.masked_fill(torch.empty_like(excluded).scatter_(1, order, excluded), -torch.inf)
    probabilities = scores.softmax(dim=1)
    if sampling.min_p > 0:
        least = probabilities.amax(dim=1, keepdim=True) * sampling.min_p
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        probabilities = probabilities / probabilities.sum(dim=1, keepdim=True)
    return probabilities


def penalize(logits: Tensor, penalty: float, seen: Tensor | None) -> Tensor:
    """Apply the repetition penalty, (batch, vocabulary) -> (batch, vocabulary)."""
    if penalty == 1 or seen is None:
        return logits
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(probabilities: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Draw a token, int64 (batch,), from distributions, (batch, vocabulary), not necessarily normalized, by inversion.

    It is the first whose cumulative probability exceeds the uniform, a random number in [0, 1) for each distribution.
    """
    cumulative = probabilities.double().cumsum(dim=1)
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=probabilities.device)[:, None]
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # the product may round up to the total, which no token exceeds
    return torch.searchsorted(cumulative, torch.minimum(numbers * total, below), right=True).squeeze(1)
