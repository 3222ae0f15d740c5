"""Speculative decoding (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023, https://arxiv.org/abs/2302.01318).

A proposer guesses some tokens, and the model verifies them in one pass. The distribution of the completions is exactly that of the model;
greedy completions are the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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

    def clear(self, row: int) -> None:
        """Forget the sequence of a row."""

    def propose(
        self, held: Sequence[Completion | None], counts: Sequence[int], numbers: Sequence[random.Random | None], seen: Tensor | None
    ) -> list[Proposal]:
        """Guess at most counts[i] tokens for each row; a row that guesses nothing has no completion.

        Args:
            held: the completion of each row.
            counts: maximum number of tokens.
            numbers: random numbers of each row.
            seen: bool (rows, vocabulary), as in `distribution`.
        """


#: Guessed tokens, and the distribution that each was drawn from, (tokens, vocabulary); None if they were not drawn.
Proposal = tuple[list[int], Tensor | None]


class PromptLookup:
    """Proposes what followed the last occurrence of the last tokens in prompt and completion (Saxena 2023, prompt lookup decoding).

    Each token is indexed once: a pass costs the same for a sequence of any length.

    Args:
        longest: maximum number of tokens that are looked up.
    """

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest
        self._indexes: dict[int, EndIndex] = {}

    def start(self, rows: int) -> None:  # noqa: ARG002 - of Proposer
        """See Proposer."""
        self._indexes = {}

    def prefill(self, rows: Sequence[int], completions: Sequence[Completion]) -> None:
        """See Proposer."""

    def clear(self, row: int) -> None:
        """See Proposer."""
        self._indexes.pop(row, None)

    def propose(
        self,
        held: Sequence[Completion | None],
        counts: Sequence[int],
        numbers: Sequence[random.Random | None],  # noqa: ARG002 - of Proposer
        seen: Tensor | None,  # noqa: ARG002 - of Proposer
    ) -> list[Proposal]:
        """See Proposer."""
        return [
            ([] if completion is None else self._look_up(row, completion, count), None)
            for row, (completion, count) in enumerate(zip(held, counts, strict=True))
        ]

    def _look_up(self, row: int, completion: Completion, count: int) -> list[int]:
        """Return at most `count` tokens that followed the longest repeated end of the sequence."""
        if row not in self._indexes:
            self._indexes[row] = EndIndex(self.longest, completion.prompt)
        index = self._indexes[row]
        index.extend(completion.tokens[len(index.tokens) - len(completion.prompt) :])
        place = index.find()
        return [] if place is None else index.tokens[place : place + count]


class EndIndex:
    """Finds where the last tokens of a growing sequence occurred before.

    Args:
        longest: maximum number of tokens that are compared.
        tokens: of the sequence.
    """

    def __init__(self, longest: int, tokens: Sequence[int]) -> None:
        self.longest, self.tokens = longest, list(tokens)
        self._places: dict[tuple[int, ...], int] = {}  # tokens -> the place after their last occurrence
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self.tokens += tokens

    def find(self) -> int | None:
        """Return the place after the last occurrence, before the end, of as many of the last tokens as possible; None for none."""
        for end in range(self._indexed + 1, len(self.tokens)):  # the end itself is not an earlier occurrence
            for size in range(1, min(self.longest, end) + 1):
                self._places[tuple(self.tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(self.tokens) - 1)
        for size in range(min(self.longest, len(self.tokens) - 1), 0, -1):
            if (place := self._places.get(tuple(self.tokens[-size:]))) is not None:
                return place
        return None


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
        self.runner.prefill(rows, [completion.prompt for completion in completions])

    def clear(self, row: int) -> None:
        """See Proposer."""
        self.runner.cache.clear([row])

    def propose(
        self, held: Sequence[Completion | None], counts: Sequence[int], numbers: Sequence[random.Random | None], seen: Tensor | None
    ) -> list[Proposal]:
        """See Proposer."""
        sequences = [[] if completion is None else [*completion.prompt, *completion.tokens] for completion in held]
        lengths = self.runner.cache.lengths
        # Tokens that were rejected are removed; of what was accepted, the cache lacks the last one or two.
        known = torch.tensor([len(sequence) - 1 for sequence in sequences]).clamp(min=0)
        self.runner.cache.truncate(torch.minimum(lengths, torch.where(known > 0, known, lengths)))
        drawn: list[list[int]] = [[] for _ in held]
        distributions: list[list[Tensor]] = [[] for _ in held]
        for guess in range(max(counts)):
            active = [row for row, count in enumerate(counts) if guess < count]
            logits = self.runner.forward(active, [sequences[row][int(self.runner.cache.lengths[row]) :] for row in active])
            q = distribution(logits, self.sampling, None if seen is None else seen[active])
            uniforms = [number.random() for row in active if (number := numbers[row]) is not None]
            chosen = draw(q, uniforms)
            if seen is not None:
                seen[active, chosen] = True
            for row, token, probabilities in zip(active, chosen.tolist(), q, strict=True):
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
        sampling, stopping, batch_size, logprobs, share: as in Generator.
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
        share: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        assert runner.lookahead > tokens, "the cache must be able to remove all guesses"
        super().__init__(runner, sampling, stopping, batch_size=batch_size, logprobs=logprobs, share=share)
        self.proposer, self.tokens = proposer, tokens
        self.proposed = self.accepted = 0
        self._guesses: dict[int, int] = {}

    def _start(self, rows: int) -> None:
        super()._start(rows)
        self.proposer.start(rows)

    def _release(self, row: int) -> None:
        held = self._rows[row]
        assert held is not None
        self._guesses.pop(held.index, None)
        self.proposer.clear(row)
        super()._release(row)

    def _step(self) -> None:
        """Guess tokens, verify them in one pass beside prompts, and append those that are accepted and one more."""
        proposals = self._propose()
        parts = self._parts()
        wanted = [0 if self._unread[row] else 1 + len(proposals[row][0]) if row in proposals else 1 for row in parts]
        tokens = [[*part, *(proposals[row][0] if row in proposals else [])] for row, part in parts.items()]
        logits = dict(zip(parts, self.runner.forward(list(parts), tokens, wanted).split(wanted), strict=True))
        lengths = self.runner.cache.lengths.clone()
        for row, (guess, q) in proposals.items():
            completion = self._rows[row]
            assert completion is not None
            accepted = self._verify(row, completion, guess, q, logits[row])
            lengths[row] = len(completion.prompt) + len(completion.tokens) - 1
            self._unread[row] = completion.tokens[-1:]
            if guess:
                change = GROWTH if accepted == len(guess) else -1
                self._guesses[completion.index] = max(1, min(self._guesses[completion.index] + change, self.tokens))
        self.runner.cache.truncate(torch.minimum(lengths, self.runner.cache.lengths))
        first = [row for row in parts if row not in proposals and not self._unread[row]]
        if first:
            self._extend(first, torch.cat([logits[row] for row in first]))
            begun = [(row, held) for row in first if (held := self._rows[row]) is not None and not held.finish_reason]
            self._guesses |= {completion.index: min(FIRST, self.tokens) for _, completion in begun}
            if begun:
                self.proposer.prefill([row for row, _ in begun], [completion for _, completion in begun])

    def _propose(self) -> dict[int, Proposal]:
        """Guess tokens for each row that has read its prompt."""
        held = [completion if completion is not None and completion.tokens else None for completion in self._rows]
        decoding = [row for row, completion in enumerate(held) if completion is not None]
        if not decoding:
            return {}
        counts = [
            0 if completion is None else min(self._guesses[completion.index], self._limit(completion) - len(completion.tokens) - 1)
            for completion in held
        ]
        numbers = [None if completion is None else self._random[completion.index] for completion in held]
        seen = None if self.sampling.repetition_penalty == 1 else self._seen.of(range(len(held)))
        proposals = self.proposer.propose(held, counts, numbers, seen)
        return {row: proposals[row] for row in decoding}

    def _verify(self, row: int, completion: Completion, guess: list[int], q: Tensor | None, logits: Tensor) -> int:
        """Append accepted tokens, and one from the residual distribution after the first that is rejected, or after all of them.

        Args:
            row: of the completion.
            completion: is extended.
            guess: proposed tokens.
            q: (guesses, vocabulary), the distributions they were drawn from; None if they were not drawn.
            logits: (guesses + 1, vocabulary), of the model.

        Returns:
            Number of accepted tokens.
        """
        seen = None
        if self.sampling.repetition_penalty != 1:
            seen = self._seen.of([row] * (len(guess) + 1))
            for index, token in enumerate(guess):
                seen[index + 1 :, token] = True
        p = distribution(logits, self.sampling, seen)
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
            if seen is not None:
                self._seen.add([row], torch.tensor([token], device=p.device))
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
