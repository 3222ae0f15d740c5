"""Generates completions for a stream of prompts, as many at a time as the batch has rows.

A row whose completion is finished takes the next prompt while the other rows continue (continuous batching, Yu et al. 2022, Orca).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling, choose

#: Maximum number of tokens, padding included, of the prompts that are processed in one pass.
PREFILL_TOKENS = 8192


@dataclass(frozen=True)
class Stopping:
    """When a completion ends.

    Attributes:
        max_tokens: maximum number of new tokens.
        end_tokens: tokens that end a completion; they are not part of it.
        strings: texts that end a completion; the text is cut before them.
        decode: tokens -> text.
    """

    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] = lambda _: ""

    def contains_string(self, tokens: Sequence[int]) -> bool:
        """Whether the last token has completed one of the strings."""
        if not self.strings:
            return False
        # A token has at least one byte; more of them, since special tokens are not part of the text.
        tail = self.decode(tokens[-(max(len(string.encode()) for string in self.strings) + 16) :])
        return any(string in tail for string in self.strings)

    def cut(self, text: str) -> str:
        """Return the text before the first of the strings."""
        return text[: min([len(text), *(text.index(string) for string in self.strings if string in text)])]


@dataclass
class Completion:
    """A prompt and its completion.

    Attributes:
        index: number of the prompt, which selects its random numbers.
        prompt: its tokens.
        tokens: tokens of the completion.
        logprobs: log-probability of each of them under the model, before the rules of sampling.
        finish_reason: "stop" (an end token or a stop string) or "length"; None while it is not finished.
    """

    index: int
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Generator:
    """Generates completions.

    Args:
        runner: the model.
        sampling: how tokens are chosen.
        stopping: when a completion ends.
        batch_size: maximum number of sequences in a forward pass.
        logprobs: whether to record log-probabilities.
    """

    def __init__(self, runner: Runner, sampling: Sampling, stopping: Stopping, *, batch_size: int, logprobs: bool = False) -> None:
        self.runner, self.sampling, self.stopping = runner, sampling, stopping
        self.batch_size, self.logprobs = batch_size, logprobs
        self._rows: list[Completion | None] = []
        self._random: dict[int, random.Random] = {}

    def run(self, prompts: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Completion]:
        """Yield the completions of prompts (index, tokens), in the order in which they are finished.

        A prompt has at least one token and less than the model's max_positions.
        """
        source = iter(prompts)
        waiting = [Completion(index, tokens) for index, tokens in islice(source, self.batch_size)]
        self._start(len(waiting))
        while True:
            free = [row for row, held in enumerate(self._rows) if held is None]
            waiting += [Completion(index, tokens) for index, tokens in islice(source, max(0, len(free) - len(waiting)))]
            if not waiting and len(free) == len(self._rows):
                return
            if free and waiting:
                count = prefill_count([len(completion.prompt) for completion in waiting[: len(free)]])
                self._prefill(free[:count], waiting[:count])
                waiting = waiting[count:]
            else:
                self._shrink()
                self._decode()
            for row, held in enumerate(self._rows):
                if held is not None and held.finish_reason:
                    self._rows[row] = None
                    del self._random[held.index]
                    yield held

    def _start(self, rows: int) -> None:
        """Begin with empty rows."""
        self._rows = [None] * rows
        self.runner.start(rows)

    def _keep(self, rows: Tensor) -> None:
        """Reduce the batch to some of its rows."""
        self.runner.keep(rows)

    def _prefill(self, rows: list[int], completions: list[Completion]) -> None:
        """Process prompts, and choose the first token of each completion."""
        for row, completion in zip(rows, completions, strict=True):
            self._rows[row] = completion
            self._random[completion.index] = self.sampling.random(completion.index)
        self.runner.cache.clear(torch.tensor(rows))
        self.runner.reserve(max(self.runner.length(completion.prompt) + self._limit(completion) for completion in completions))
        self._extend(completions, self.runner.prefill(rows, [completion.prompt for completion in completions]))

    def _decode(self) -> None:
        """Choose the next token of each completion."""
        logits = self.runner.forward(range(len(self._rows)), [held.tokens[-1:] if held else [] for held in self._rows])
        active = [row for row, held in enumerate(self._rows) if held is not None]
        self._extend([held for held in self._rows if held is not None], logits if len(active) == len(self._rows) else logits[active])

    def _shrink(self) -> None:
        """Drop idle rows when no prompts are left for them and they are half of the batch."""
        active = [row for row, held in enumerate(self._rows) if held is not None]
        if 2 * len(active) <= len(self._rows):
            self._keep(torch.tensor(active))
            self._rows = [self._rows[row] for row in active]

    def _extend(self, completions: list[Completion], logits: Tensor) -> None:
        """Append a token to each completion."""
        histories = (
            [[*completion.prompt, *completion.tokens] for completion in completions] if self.sampling.repetition_penalty != 1 else []
        )
        uniforms = [self._random[completion.index].random() for completion in completions] if self.sampling.temperature else []
        chosen = choose(logits, self.sampling, histories, uniforms)
        if self.logprobs:
            values = logits.float().log_softmax(dim=1).gather(1, chosen[:, None]).squeeze(1).tolist()
            for completion, value in zip(completions, values, strict=True):
                completion.logprobs.append(value)
        for completion, token in zip(completions, chosen.tolist(), strict=True):
            self._append(completion, token)

    def _append(self, completion: Completion, token: int) -> None:
        """Append a token, and decide whether the completion is finished."""
        if token in self.stopping.end_tokens:
            completion.finish_reason = "stop"
            del completion.logprobs[len(completion.tokens) :]
            return
        completion.tokens.append(token)
        if self.stopping.contains_string(completion.tokens):
            completion.finish_reason = "stop"
        elif len(completion.tokens) >= self._limit(completion):
            completion.finish_reason = "length"

    def _limit(self, completion: Completion) -> int:
        """Maximum number of new tokens."""
        return min(self.stopping.max_tokens, self.runner.room(completion.prompt))


def prefill_count(lengths: Sequence[int]) -> int:
    """Return how many prompts are processed in one pass: their padded tokens do not exceed PREFILL_TOKENS, unless it is one."""
    longest = 0
    for count, length in enumerate(lengths):
        longest = max(longest, length)
        if count and longest * (count + 1) > PREFILL_TOKENS:
            return count
    return len(lengths)
