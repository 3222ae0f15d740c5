"""Generates completions for a stream of prompts, as many at a time as the batch has rows.

A row whose completion is finished takes the next prompt while the other rows continue (continuous batching, Yu et al. 2022, Orca). Prompts
are processed beside single tokens of other rows, long ones in parts (chunked prefill, Agrawal et al. 2023, https://arxiv.org/abs/2308.16369).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling, SeenTokens, choose

#: Maximum number of tokens, padding of an encoder included, of the prompts that are started in one pass.
PREFILL_TOKENS = 8192
#: Maximum number of tokens of prompts in one pass; what is left of them follows in the next ones.
PASS_TOKENS = 2048


@dataclass(frozen=True)
class Stopping:
    """When a completion ends.

    Attributes:
        end_tokens: tokens that end a completion; they are not part of it.
        strings: texts that end a completion; the text is cut before them.
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
        batch_size: maximum number of sequences in a forward pass.
        share: tokens of a sequence -> the share of the cache's memory that it takes. A prompt waits until there is room for its longest
            completion.
    """

    def __init__(
        self,
        runner: Runner,
        sampling: Sampling,
        stopping: Stopping,
        *,
        batch_size: int,
        logprobs: bool = False,
        share: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        self.runner, self.sampling, self.stopping = runner, sampling, stopping
        self.batch_size, self.logprobs, self.share = batch_size, logprobs, share
        self._rows: list[Completion | None] = []
        self._random: dict[int, random.Random] = {}
        self._unread: dict[int, Sequence[int]] = {}  # row -> tokens that are not in the cache
        self._reserved: dict[int, float] = {}  # row -> share of its longest completion
        self._seen = SeenTokens()

    def run(self, prompts: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Completion]:
        """Yield the completions of prompts (index, tokens), in the order in which they are finished.

        A prompt has at least one token and less than the model's max_positions.
        Ranks that share experts call this together.
        """
        source = iter(prompts)
        waiting: list[Completion] = []
        self._start(self.batch_size)
        while True:
            free = [row for row, held in enumerate(self._rows) if held is None]
            waiting += [Completion(index, tokens) for index, tokens in islice(source, max(0, len(free) - len(waiting)))]
            if not waiting and len(free) == len(self._rows):
                self.runner.finish()
                return
            waiting = waiting[self._admit(free, waiting) :]
            self._step()
            for row, held in enumerate(self._rows):
                if held is not None and held.finish_reason:
                    self._release(row)
                    yield held

    def _start(self, rows: int) -> None:
        """Begin with empty rows."""
        self._rows = [None] * rows
        self.runner.start(rows)

    def _admit(self, free: list[int], waiting: list[Completion]) -> int:
        """Give prompts to free rows; returns how many."""
        admitted: list[Completion] = []
        rows: list[int] = []
        for row, completion in zip(free, waiting[: prefill_count([len(completion.prompt) for completion in waiting])], strict=False):
            needed = self.share(self.runner.length(completion.prompt) + self._limit(completion))
            if self._reserved and sum(self._reserved.values()) + needed > 1:
                break
            self._reserved[row], self._rows[row] = needed, completion
            self._random[completion.index] = self.sampling.random(completion.index)
            admitted.append(completion)
            rows.append(row)
        if rows:
            unread = self.runner.begin_prompts(rows, [completion.prompt for completion in admitted])
            self._unread |= zip(rows, unread, strict=True)
        return len(rows)

    def _release(self, row: int) -> None:
        """Free a row whose completion is finished."""
        held = self._rows[row]
        assert held is not None
        self._rows[row] = None
        del self._random[held.index], self._reserved[row], self._unread[row]
        self.runner.cache.clear([row])

    def _parts(self) -> dict[int, Sequence[int]]:
        """Return the tokens that each row reads in the next pass; what is left of a prompt stays in `_unread`."""
        parts, left = {}, PASS_TOKENS
        for row, unread in self._unread.items():
            count = 1 if len(unread) == 1 else min(left, len(unread))
            if count:
                parts[row], self._unread[row] = unread[:count], unread[count:]
                left -= 0 if len(unread) == 1 else count
        return parts

    def _step(self) -> None:
        """Run a pass, and choose a token for each row that has read all of its tokens."""
        parts = self._parts()
        complete = [row for row in parts if not self._unread[row]]
        self._extend(complete, self.runner.forward(list(parts), list(parts.values()), [int(not self._unread[row]) for row in parts]))

    def _extend(self, rows: list[int], logits: Tensor) -> None:
        """Append a token to the completion of each row; logits is (rows, vocabulary)."""
        if not rows:
            return
        completions = [completion for row in rows if (completion := self._rows[row]) is not None]
        seen = self._seen_by(rows, logits)
        uniforms = [self._random[completion.index].random() for completion in completions] if self.sampling.temperature else []
        chosen = choose(logits, self.sampling, seen, uniforms)
        if seen is not None:
            self._seen.add(rows, chosen)
        if self.logprobs:
            values = logits.float().log_softmax(dim=1).gather(1, chosen[:, None]).squeeze(1).tolist()
            for completion, value in zip(completions, values, strict=True):
                completion.logprobs.append(value)
        for row, completion, token in zip(rows, completions, chosen.tolist(), strict=True):
            self._append(completion, token)
            self._unread[row] = completion.tokens[-1:]

    def _seen_by(self, rows: list[int], logits: Tensor) -> Tensor | None:
        """Return the tokens of prompt and completion of each row, bool (rows, vocabulary); None without a repetition penalty."""
        if self.sampling.repetition_penalty == 1:
            return None
        for row in rows:
            if (completion := self._rows[row]) is not None and not completion.tokens:
                self._seen.begin(row, completion.prompt, logits, len(self._rows))
        return self._seen.of(rows)

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
