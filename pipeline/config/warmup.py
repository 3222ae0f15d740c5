"""Sequence length and batch size as functions of the step, and the warm-up and the decays of the learning rate.

A sample is always a window of training.sample_length tokens. During a sequence warm-up each sample is split into several shorter
sequences: the samples of a step, their order, and the tokens of a micro-batch are the same as without a warm-up.
(Li et al. 2022, "The Stability-Efficiency Dilemma", also shorten the sequences of early steps, but drop the truncated tokens.)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from pipeline.config.data import WarmupConfig
from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.training import TrainingConfig

#: training.epochs of a run that sets neither it nor training.steps, as in TRL.
DEFAULT_EPOCHS = 3.0


def value_at(entries: Sequence[WarmupConfig], step: int, final: int) -> int:
    """Return the value at a step (counted from 0): that of the first entry with step < until_step, else the final value."""
    return next((entry.value for entry in entries if step < entry.until_step), final)


def batch_size(training: TrainingConfig, step: int) -> int:
    """Return the global batch size at a step, in samples."""
    sequences, length = _phase(training, step)
    return value_at(training.batch_rampup, step, sequences * length // training.sample_length)


def sequence_length(training: TrainingConfig, step: int) -> int:
    """Return the sequence length at a step, in tokens."""
    return value_at(training.sequence_warmup, step, _phase(training, step)[1])


def _phase(training: TrainingConfig, step: int) -> tuple[int, int]:
    """Global batch size in sequences, and sequence length, of the phase of a step."""
    phase = next((phase for phase in training.phases if phase.until_step is None or step < phase.until_step), None)
    if phase is None:
        return training.global_batch_size, training.sequence_length
    return phase.global_batch_size or training.global_batch_size, phase.sequence_length or training.sequence_length


def samples(training: TrainingConfig, steps: int) -> int:
    """Return the number of samples of the first `steps` steps."""
    ends = {entry.until_step for entry in training.batch_rampup} | {phase.until_step or steps for phase in training.phases}
    total, first = 0, 0
    for end in sorted({min(end, steps) for end in ends} | {steps}):
        total += (end - first) * batch_size(training, first)
        first = end
    return total


def steps_for_tokens(training: TrainingConfig, tokens: int) -> int:
    """Return the smallest number of steps that process at least `tokens` tokens."""
    return steps_for_samples(training, -(-tokens // training.sample_length))


def steps_for_samples(training: TrainingConfig, wanted: int) -> int:
    """Return the smallest number of steps that read at least this many samples."""
    return bisect_left(range(wanted + 1), wanted, key=lambda steps: samples(training, steps))


def lr_steps(optimizer: OptimizerConfig, training: TrainingConfig) -> int:
    """Return the number of steps of the learning rate's warm-up: optimizer.warmup_steps, or optimizer.warmup_ratio of all, rounded up."""
    return optimizer.warmup_steps or math.ceil(optimizer.warmup_ratio * training.steps)


def decays(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[tuple[int, int]]:
    """Yield (steps before it, steps at its end) of every decay of optimizer.schedule=wsd, in order; the last one ends with the run."""
    for end in (*optimizer.decay_ends, training.steps):
        yield end - (optimizer.decay_steps or max(1, end // 10)), end


def phases(training: TrainingConfig) -> Iterator[tuple[int, int, int]]:
    """Yield (steps, global batch size, sequence length) for every run of equal steps, in order."""
    ends = {entry.until_step for entry in (*training.batch_rampup, *training.sequence_warmup)}
    first = 0
    for end in sorted({min(end, training.steps) for end in ends} | {training.steps}):
        yield end - first, batch_size(training, first), sequence_length(training, first)
        first = end


def keyed_values(entries: Sequence[WarmupConfig], name: str, final: int) -> Iterator[tuple[str, int]]:
    """Yield (key, value) for every value of training.`name` during the run: those of the warm-up, then the final one."""
    warmup = {"global_batch_size": "batch_rampup", "sequence_length": "sequence_warmup"}[name]
    yield from ((f"training.{warmup}.{number}.value", entry.value) for number, entry in enumerate(entries))
    yield f"training.{name}", final
