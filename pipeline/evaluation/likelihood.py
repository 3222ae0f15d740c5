"""Log-likelihoods of texts, and completions, of a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pipeline.common.errors import UserError
from pipeline.generation.generator import Generator, Stopping
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling

#: Maximum number of tokens of a batch, and of its logits; a single sequence may exceed them.
BATCH_TOKENS, BATCH_LOGITS = 1 << 14, 1 << 28
#: Maximum number of completions at a time.
BATCH_COMPLETIONS = 32


class Scored(NamedTuple):
    """The log-likelihood of a continuation given its context, in nats, and whether greedy decoding would write it."""

    value: float
    greedy: bool


class Question(NamedTuple):
    """Tokens of a context, at least one, and of a continuation of it, at least one."""

    context: list[int]
    continuation: list[int]


def log_likelihoods(runner: Runner, vocab_size: int, questions: Sequence[Question]) -> list[Scored]:
    """Return the score of each continuation. Contexts are cut on the left to fit in the model.

    Args:
        questions: in any order. Continuations of one token with the same context cost one forward pass together.

    Raises:
        UserError: a continuation is longer than the model's longest sequence.
    """
    limit = runner.max_positions
    if (longest := max((len(question.continuation) for question in questions), default=0)) > limit:
        rule = f"is less than the {longest} tokens of a continuation"
        raise UserError.of("model.max_positions", limit, rule, "choose tasks with shorter answers")
    inputs: dict[tuple[int, ...], list[int]] = {}
    for number, question in enumerate(questions):
        whole = [*question.context, *question.continuation]
        inputs.setdefault(tuple(whole[-(limit + 1) : -1]), []).append(number)
    scores = [Scored(0.0, True)] * len(questions)
    for batch in _batches(sorted(inputs, key=len, reverse=True), vocab_size):
        runner.start(len(batch))
        # Only the tokens before a continuation need logits.
        wanted = [max(len(questions[number].continuation) for number in inputs[tokens]) for tokens in batch]
        parts = runner.forward(range(len(batch)), batch, wanted).split(wanted)
        for row, tokens in enumerate(batch):
            for number in inputs[tokens]:
                target = torch.tensor(questions[number].continuation, device=parts[row].device)
                part = parts[row][len(parts[row]) - len(target) :].float().log_softmax(dim=1)
                value = part.gather(1, target[:, None]).sum()
                scores[number] = Scored(float(value), bool((part.argmax(dim=1) == target).all()))
    return scores


def _batches(inputs: Sequence[tuple[int, ...]], vocab_size: int) -> Iterator[Sequence[tuple[int, ...]]]:
    """Divide inputs, the longest first, into batches."""
    start = 0
    while start < len(inputs):
        width = len(inputs[start])
        rows = max(1, min(BATCH_TOKENS // width, BATCH_LOGITS // (width * vocab_size)))
        yield inputs[start : start + rows]
        start += rows


def completions(runner: Runner, sampling: Sampling, stopping: Stopping, prompts: Sequence[tuple[int, list[int]]]) -> list[str]:
    """Return the text that completes each prompt, cut before the stop strings.

    Args:
        prompts: number, which selects the random numbers, and tokens. Prompts are cut on the left such that max_tokens fit.

    Raises:
        UserError: max_tokens leaves no room for a prompt.
    """
    room = runner.max_positions - stopping.max_tokens
    if prompts and room < 1:
        rule = f"leaves no room for a prompt and the {stopping.max_tokens} tokens that a task generates"
        raise UserError.of("model.max_positions", runner.max_positions, rule, "set a smaller max_gen_toks in the task file")
    generator = Generator(runner, sampling, stopping, batch_size=BATCH_COMPLETIONS)
    tokens_of = {
        completion.index: completion.tokens for completion in generator.run((number, tokens[-room:]) for number, tokens in prompts)
    }
    return [stopping.cut(stopping.decode(tokens_of[number])) for number, _ in prompts]
