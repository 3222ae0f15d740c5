"""Sequence length and batch size of every step, as arithmetic.

A sample is always a window of training.sequence_length tokens. While sequences are shorter, each sample is cut into several, so the
samples that a step consumes, their order and the tokens of a micro-batch are the same with and without a sequence warm-up
(Li et al. 2022, "The Stability-Efficiency Dilemma", shorten the sequences of early steps too, but drop what is cut off).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from pipeline.config.data import WarmupConfig
from pipeline.config.schema import TrainingConfig


def value_at(entries: Sequence[WarmupConfig], step: int, final: int) -> int:
    """The value at a step (counted from 0): that of the first entry that still holds, or the final one."""
    return next((entry.value for entry in entries if step < entry.until_step), final)


def batch_size(training: TrainingConfig, step: int) -> int:
    """Samples of a step's global batch."""
    return value_at(training.batch_rampup, step, training.global_batch_size)


def sequence_length(training: TrainingConfig, step: int) -> int:
    """Tokens of a step's sequences."""
    return value_at(training.sequence_warmup, step, training.sequence_length)


def samples(training: TrainingConfig, steps: int) -> int:
    """Samples of the first `steps` steps."""
    total, first = 0, 0
    for entry in training.batch_rampup:
        last = min(entry.until_step, steps)
        total += max(last - first, 0) * entry.value
        first = max(first, last)
    return total + (steps - first) * training.global_batch_size


def steps_for_tokens(training: TrainingConfig, tokens: int) -> int:
    """The steps after which a run has seen so many tokens."""
    return bisect_left(range(tokens + 1), tokens, key=lambda steps: samples(training, steps) * training.sequence_length)


def keyed_values(entries: Sequence[WarmupConfig], name: str, final: int) -> Iterator[tuple[str, int]]:
    """Every value that training.`name` takes, with the key that sets it: the warm-up's, then the final one."""
    warmup = {"global_batch_size": "batch_rampup", "sequence_length": "sequence_warmup"}[name]
    yield from ((f"training.{warmup}.{number}.value", entry.value) for number, entry in enumerate(entries))
    yield f"training.{name}", final
