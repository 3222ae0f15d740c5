"""Beam search, with the scores and the stopping rule of transformers' default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from pipeline.generation.generator import Completion, Stopping
from pipeline.generation.runner import Runner

#: Log-probability of a beam that does not exist.
NONE = -1e9


@dataclass
class Search:
    """The beams of one prompt.

    Attributes:
        limit: maximum number of tokens.
        running: tokens of each beam; all have the same length.
        scores: sum of the log-probabilities of each beam, the best first.
        finished: (score, tokens) of completed beams, the best first; score is the sum / length^length_penalty.
        done: whether no running beam can become better than the finished ones.
    """

    limit: int
    running: list[list[int]]
    scores: list[float]
    finished: list[tuple[float, list[int]]] = field(default_factory=list)
    done: bool = False

    def advance(self, candidates: Iterable[tuple[float, int, int]], ends: frozenset[int], length_penalty: float) -> list[int]:
        """Extend the beams by a token; returns the beam that each of the new beams continues.

        Candidates are (score, beam, token) of the best 2 x beams continuations, the best first.
        """
        beams, length = len(self.running), len(self.running[0]) + 1
        following: list[tuple[float, int, int]] = []
        for rank, (score, beam, token) in enumerate(candidates):
            if token in ends or length >= self.limit:
                if rank < beams and not self.done:
                    completed = self.running[beam] if token in ends else [*self.running[beam], token]
                    self.finished.append((score / length**length_penalty, completed))
            elif len(following) < beams:
                following.append((score, beam, token))
        self.finished = sorted(self.finished, key=lambda beam: -beam[0])[:beams]
        best = following[0][0] / length**length_penalty if following else -torch.inf
        self.done |= length >= self.limit or (len(self.finished) == beams and best <= self.finished[-1][0])
        following += [(NONE, 0, 0)] * (beams - len(following))
        self.running = [[*self.running[beam], token] for _, beam, token in following]
        self.scores = [score for score, _, _ in following]
        return [beam for _, beam, _ in following]


class BeamGenerator:
    """Generates the most probable completions that beam search finds; has the interface of Generator.

    Args:
        stopping: when a completion ends; stop strings are not supported.
        length_penalty: exponent of the length by which the score of a completion is divided.
    """

    def __init__(self, runner: Runner, stopping: Stopping, *, beams: int, length_penalty: float, batch_size: int) -> None:
        self.runner, self.stopping, self.beams, self.length_penalty = runner, stopping, beams, length_penalty
        self.prompts = max(1, batch_size // beams)

    def run(self, prompts: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Completion]:
        """Yield the completions of prompts (index, tokens). Ranks that share experts call this together."""
        source = iter(prompts)
        while batch := [Completion(index, tokens) for index, tokens in islice(source, self.prompts)]:
            searches = self._search([completion.prompt for completion in batch])
            for completion, search in zip(batch, searches, strict=True):
                completion.tokens = search.finished[0][1]
                completion.finish_reason = "length" if len(completion.tokens) >= search.limit else "stop"
                yield completion
        self.runner.finish()

    def _search(self, prompts: list[Sequence[int]]) -> list[Search]:
        """Return the completed searches of some prompts."""
        runner, beams = self.runner, self.beams
        limits = [min(self.stopping.max_tokens, runner.room(prompt)) for prompt in prompts]
        searches = [Search(limit, [[] for _ in range(beams)], [0.0] + [NONE] * (beams - 1)) for limit in limits]
        runner.start(len(prompts))
        logits = runner.prefill(range(len(prompts)), prompts).repeat_interleave(beams, dim=0)
        runner.keep(torch.arange(len(prompts)).repeat_interleave(beams))
        while True:
            order = self._advance(searches, logits)
            if all(search.done for search in searches):
                return searches
            runner.keep(torch.tensor(order))
            # A prompt that is done keeps its rows, but adds no tokens: its length is limited.
            active = [row for row in range(len(order)) if not searches[row // beams].done]
            new = [searches[row // beams].running[row % beams][-1:] for row in active]
            logits = logits.new_zeros(len(order), logits.shape[1]).index_copy(
                0, torch.tensor(active, device=logits.device), runner.forward(active, new)
            )

    def _advance(self, searches: list[Search], logits: Tensor) -> list[int]:
        """Extend all beams by a token; returns the row that each row continues."""
        scores = torch.tensor([search.scores for search in searches], device=logits.device)
        vocabulary = logits.shape[1]
        total = logits.float().log_softmax(dim=1).view(len(searches), self.beams, vocabulary) + scores[:, :, None]
        best = total.flatten(1).topk(2 * self.beams, dim=1)
        order = []
        for index, (search, values, choices) in enumerate(zip(searches, best.values.tolist(), best.indices.tolist(), strict=True)):
            origins = list(range(self.beams))
            if not search.done:
                pairs = (divmod(choice, vocabulary) for choice in choices)
                candidates = [(value, beam, token) for value, (beam, token) in zip(values, pairs, strict=True)]
                origins = search.advance(candidates, self.stopping.end_tokens, self.length_penalty)
            order += [index * self.beams + origin for origin in origins]
        return order
