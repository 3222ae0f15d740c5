"""Speculative decoding (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023, https://arxiv.org/abs/2302.01318).

A proposer guesses some tokens, and the model verifies them in one pass. The distribution of the completions is exactly that of the model;
greedy completions are the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.generation.generator import Completion, Generator, Stopping
from pipeline.generation.proposers import DraftModel, PromptLookup, Proposal
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling, distribution, draw

#: Number of tokens that are guessed first, and how it grows after a pass in which all of them were accepted; after others it falls by 1.
FIRST, GROWTH = 4, 2


class SpeculativeGenerator(Generator):
    """Generates completions with a proposer.

    The number of guessed tokens follows the acceptance of earlier ones, for each completion. It depends on tokens that are chosen already,
    so the distribution of the completions is not affected.

    Args:
        runner: its lookahead is at least tokens + 1.
        tokens: maximum number of guessed tokens in a pass.
    """

    def __init__(
        self,
        runner: Runner,
        sampling: Sampling,
        stopping: Stopping,
        *,
        batch_size: int,
        proposer: PromptLookup | DraftModel,
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
            self.accepted += 1 if accepted else 0
            if logprobs is not None:
                completion.logprobs.append(float(logprobs[index, token]))
            self._append(completion, token)
            if seen is not None:
                self._seen.add([row], torch.tensor([token], device=p.device))
            if completion.finish_reason or not accepted:
                return index + 1 if accepted else index
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
