"""Speculative decoding (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023, https://arxiv.org/abs/2302.01318).

A proposer guesses some tokens, and the model verifies them in one pass. The distribution of the completions is exactly that of the model;
greedy completions are the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipeline.generation.generator import Completion, Generator, Stopping
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling, distribution, draw


class Proposer(Protocol):
    """Guesses the next tokens of completions; row i of a batch is always the same sequence."""

    def start(self, rows: int) -> None:
        """Begin with empty rows."""

    def prefill(self, rows: Sequence[int], completions: Sequence[Completion]) -> None:
        """Take new prompts into rows."""

    def keep(self, rows: Tensor) -> None:
        """As KeyValueCache.keep."""

    def propose(self, held: Sequence[Completion | None], counts: Sequence[int], numbers: Sequence[random.Random | None]) -> list[Proposal]:
        """Guess at most counts[i] tokens for each row; an idle row has no completion."""


#: Guessed tokens, and the distribution that each was drawn from, (tokens, vocabulary); None if they were not drawn.
Proposal = tuple[list[int], Tensor | None]


class PromptLookup:
    """Proposes what followed the last occurrence of the last tokens in prompt and completion (Saxena 2023, prompt lookup decoding).

    Args:
        longest: maximum number of tokens that are looked up.
    """

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest

    def start(self, rows: int) -> None:
        """See Proposer."""

    def prefill(self, rows: Sequence[int], completions: Sequence[Completion]) -> None:
        """See Proposer."""

    def keep(self, rows: Tensor) -> None:
        """See Proposer."""

    def propose(
        self,
        held: Sequence[Completion | None],
        counts: Sequence[int],
        numbers: Sequence[random.Random | None],  # noqa: ARG002 - of Proposer
    ) -> list[Proposal]:
        """See Proposer."""
        return [
            ([] if completion is None else self._look_up([*completion.prompt, *completion.tokens], count), None)
            for completion, count in zip(held, counts, strict=True)
        ]

    def _look_up(self, tokens: list[int], count: int) -> list[int]:
        """Return at most `count` tokens that followed the longest repeated end of the sequence."""
        for size in range(min(self.longest, len(tokens) - 1), 0, -1):
            end = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == end:
                    return tokens[start + size : start + size + count]
        return []


class DraftModel:
    """Proposes tokens that a smaller model with the same vocabulary draws.

    Args:
        runner: the draft model; its lookahead is at least 2.
        sampling: the rules of the target: the closer the distributions, the more tokens are accepted.
    """

    def __init__(self, runner: Runner, sampling: Sampling) -> None:
        self.runner, self.sampling = runner, sampling

    def start(self, rows: int) -> None:
        """See Proposer."""
        self.runner.start(rows)

    def prefill(self, rows: Sequence[int], completions: Sequence[Completion]) -> None:
        """See Proposer; the first token of a completion is chosen by the target."""
        self.runner.cache.clear(torch.tensor(rows))
        self.runner.reserve(max(len(completion.prompt) for completion in completions))
        self.runner.prefill(rows, [completion.prompt for completion in completions])

    def keep(self, rows: Tensor) -> None:
        """See Proposer."""
        self.runner.keep(rows)

    def propose(self, held: Sequence[Completion | None], counts: Sequence[int], numbers: Sequence[random.Random | None]) -> list[Proposal]:
        """See Proposer."""
        sequences = [[] if completion is None else [*completion.prompt, *completion.tokens] for completion in held]
        lengths = self.runner.cache.lengths
        # Tokens that were rejected are removed; of what was accepted, the cache lacks the last one or two.
        known = torch.tensor([len(sequence) - 1 for sequence in sequences]).clamp(min=0)
        self.runner.cache.truncate(torch.minimum(lengths, torch.where(known > 0, known, lengths)))
        self.runner.reserve(max(len(sequence) + count for sequence, count in zip(sequences, counts, strict=True)))
        drawn: list[list[int]] = [[] for _ in held]
        distributions: list[list[Tensor]] = [[] for _ in held]
        for guess in range(max(counts)):
            active = [row for row, count in enumerate(counts) if guess < count]
            new = [sequences[row][int(self.runner.cache.lengths[row]) :] if row in active else [] for row in range(len(held))]
            logits = self.runner.forward(range(len(held)), new)[active]
            q = distribution(logits, self.sampling, [sequences[row] for row in active])
            uniforms = [number.random() for row in active if (number := numbers[row]) is not None]
            for row, token, probabilities in zip(active, draw(q, uniforms).tolist(), q, strict=True):
                sequences[row].append(token)
                drawn[row].append(token)
                distributions[row].append(probabilities)
        return [(tokens, torch.stack(rows) if rows else None) for tokens, rows in zip(drawn, distributions, strict=True)]


#: Number of tokens that are guessed first, and how it grows after a pass in which all of them were accepted; after others it falls by 1.
FIRST, GROWTH = 4, 2


class SpeculativeGenerator(Generator):
    """Generates completions with a proposer.

    The number of guessed tokens follows the acceptance of earlier ones, for each completion. It depends on tokens that are chosen already,
    so the distribution of the completions is not affected.

    Args:
        runner: the model; its lookahead is at least tokens + 1.
        sampling, stopping, batch_size, logprobs: as in Generator.
        proposer: guesses tokens.
        tokens: maximum number of guessed tokens in a pass.

    Attributes:
        proposed, accepted: numbers of guessed tokens.
    """

    def __init__(
        self,
        runner: Runner,
        sampling: Sampling,
        stopping: Stopping,
        *,
        batch_size: int,
        proposer: Proposer,
        tokens: int,
        logprobs: bool = False,
    ) -> None:
        assert runner.lookahead > tokens, "the cache must be able to remove all guesses"
        super().__init__(runner, sampling, stopping, batch_size=batch_size, logprobs=logprobs)
        self.proposer, self.tokens = proposer, tokens
        self.proposed = self.accepted = 0
        self._guesses: dict[int, int] = {}

    def _start(self, rows: int) -> None:
        super()._start(rows)
        self.proposer.start(rows)

    def _prefill(self, rows: list[int], completions: list[Completion]) -> None:
        super()._prefill(rows, completions)
        self.proposer.prefill(rows, completions)
        self._guesses |= {completion.index: min(FIRST, self.tokens) for completion in completions if not completion.finish_reason}

    def _keep(self, rows: Tensor) -> None:
        super()._keep(rows)
        self.proposer.keep(rows)

    def _decode(self) -> None:
        """Guess tokens, verify them in one pass, and append those that are accepted and one more."""
        held = self._rows
        counts = [
            0 if completion is None else min(self._guesses[completion.index], self._limit(completion) - len(completion.tokens) - 1)
            for completion in held
        ]
        proposals = self.proposer.propose(
            held, counts, [None if completion is None else self._random[completion.index] for completion in held]
        )
        before = self.runner.cache.lengths.clone()
        new = [
            [] if completion is None else [completion.tokens[-1], *guess] for completion, (guess, _) in zip(held, proposals, strict=True)
        ]
        logits = self.runner.forward(range(len(held)), new, every=True)
        for row, (completion, (guess, q)) in enumerate(zip(held, proposals, strict=True)):
            if completion is not None:
                accepted = self._verify(completion, guess, q, logits[row, : len(guess) + 1])
                before[row] = len(completion.prompt) + len(completion.tokens) - 1
                if completion.finish_reason:
                    del self._guesses[completion.index]
                elif guess:
                    change = GROWTH if accepted == len(guess) else -1
                    self._guesses[completion.index] = max(1, min(self._guesses[completion.index] + change, self.tokens))
        self.runner.cache.truncate(torch.minimum(before, self.runner.cache.lengths))

    def _verify(self, completion: Completion, guess: list[int], q: Tensor | None, logits: Tensor) -> int:
        """Append accepted tokens, and one from the residual distribution after the first that is rejected, or after all of them.

        Args:
            completion: is extended.
            guess: proposed tokens.
            q: (guesses, vocabulary), the distributions they were drawn from; None if they were not drawn.
            logits: (guesses + 1, vocabulary), of the model.

        Returns:
            Number of accepted tokens.
        """
        sequence = [*completion.prompt, *completion.tokens, *guess]
        first = len(sequence) - len(guess)
        p = distribution(logits, self.sampling, [sequence[: first + index] for index in range(len(guess) + 1)])
        numbers = self._random[completion.index]
        logprobs = logits.float().log_softmax(dim=1) if self.logprobs else None
        self.proposed += len(guess)
        chosen = torch.tensor(guess, dtype=torch.int64, device=p.device)[:, None]
        chances = p[: len(guess)].gather(1, chosen).squeeze(1).tolist()
        drawn_with = [1.0] * len(guess) if q is None else q.gather(1, chosen).squeeze(1).tolist()
        for index in range(len(guess) + 1):
            accepted = index < len(guess) and numbers.random() * drawn_with[index] < chances[index]
            token = (
                guess[index]
                if accepted
                else self._draw(p[index], guess[index : index + 1], None if q is None else q[index : index + 1], numbers)
            )
            self.accepted += accepted
            if logprobs is not None:
                completion.logprobs.append(float(logprobs[index, token]))
            self._append(completion, token)
            if completion.finish_reason or not accepted:
                return index + accepted
        raise AssertionError("the token after the last guess is never an accepted guess")

    def _draw(self, p: Tensor, guess: list[int], q: Tensor | None, numbers: random.Random) -> int:
        """Draw a token from p, or after a rejected guess from the part of p that exceeds the proposer's distribution."""
        residual = p
        if guess:
            point = torch.zeros_like(p).index_fill_(0, torch.tensor(guess, device=p.device), 1.0)
            residual = (p - (point if q is None else q[0])).clamp(min=0)
            if residual.sum() == 0:  # by rounding
                residual = p
        return int(draw(residual[None], [numbers.random()])[0])
