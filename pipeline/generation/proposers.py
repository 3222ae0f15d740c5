"""What guesses tokens for speculative decoding: a draft model, or what followed the same tokens before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.generation.generator import Completion
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling, distribution, draw

#: Guessed tokens, and the distribution that each was drawn from, (tokens, vocabulary); None if they were not drawn.
Proposal = tuple[list[int], Tensor | None]


class PromptLookup:
    """Proposes what followed the last occurrence of the last tokens in prompt and completion (Saxena 2023, prompt lookup decoding).

    Each token is indexed once: a pass costs the same for a sequence of any length. Row i of a batch is always the same sequence.

    Args:
        longest: maximum number of tokens that are looked up.
    """

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest
        self._indexes: dict[int, EndIndex] = {}

    def start(self, rows: int) -> None:  # noqa: ARG002 - read by DraftModel
        """Begin with empty rows."""
        self._indexes = {}

    def prefill(self, rows: Sequence[int], completions: Sequence[Completion]) -> None:
        """Take new prompts into rows."""

    def clear(self, row: int) -> None:
        """Forget the sequence of a row."""
        self._indexes.pop(row, None)

    def propose(
        self,
        held: Sequence[Completion | None],
        counts: Sequence[int],
        numbers: Sequence[random.Random | None],  # noqa: ARG002 - read by DraftModel
        seen: Tensor | None,  # noqa: ARG002 - read by DraftModel
    ) -> list[Proposal]:
        """Guess at most counts[i] tokens for each row with a completion; `seen` is bool (rows, vocabulary) as in `distribution`."""
        return [
            ([] if completion is None else self._look_up(row, completion, count), None)
            for row, (completion, count) in enumerate(zip(held, counts, strict=True))
        ]

    def _look_up(self, row: int, completion: Completion, count: int) -> list[int]:
        """Return at most `count` tokens that followed the longest repeated end of the sequence."""
        if row not in self._indexes:
            self._indexes[row] = EndIndex(self.longest, completion.prompt)
        index = self._indexes[row]
        index.tokens += completion.tokens[len(index.tokens) - len(completion.prompt) :]
        place = index.find()
        return [] if place is None else index.tokens[place : place + count]


class EndIndex:
    """Finds where the last tokens, at most `longest`, of a growing sequence occurred before."""

    def __init__(self, longest: int, tokens: Sequence[int]) -> None:
        self.longest, self.tokens = longest, list(tokens)
        self._places: dict[tuple[int, ...], int] = {}  # tokens -> the place after their last occurrence
        self._indexed = 0

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
        """See PromptLookup."""
        self.runner.start(rows)

    def prefill(self, rows: Sequence[int], completions: Sequence[Completion]) -> None:
        """See PromptLookup; the first token of a completion is chosen by the target."""
        self.runner.prefill(rows, [completion.prompt for completion in completions])

    def clear(self, row: int) -> None:
        """See PromptLookup."""
        self.runner.cache.clear([row])

    def propose(
        self, held: Sequence[Completion | None], counts: Sequence[int], numbers: Sequence[random.Random | None], seen: Tensor | None
    ) -> list[Proposal]:
        """See PromptLookup."""
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
