"""Rules of the training data: blends, their phases, and warm-ups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipeline.config.schema import RunConfig, WarmupConfig
from pipeline.errors import Violation


def violations(config: RunConfig) -> Iterator[Violation]:
    """Every broken rule, as far as it shows without opening the data."""
    yield from _blend(config)
    yield from _phases(config)
    training = config.training
    for name in ("sequence_warmup", "batch_warmup"):
        yield from _order(f"training.{name}", getattr(training, name))
    for number, entry in enumerate(training.sequence_warmup):
        if training.sequence_length % entry.value or entry.value < 2:
            why = f"must divide training.sequence_length={training.sequence_length} and be at least 2: each sample is cut into equal parts"
            yield Violation(f"training.sequence_warmup.{number}.value", entry.value, why, "choose such a length")


def _blend(config: RunConfig) -> Iterator[Violation]:
    """The weights of the blend itself."""
    blend, phases = config.data.blend, config.data.phases
    weights = {name: corpus.weight for name, corpus in blend.items() if corpus.weight is not None}
    if phases and not blend:
        yield Violation(
            "data.phases", f"{len(phases)} phases", "weigh the corpora of data.blend, which is empty", "name them in data.blend"
        )
    elif phases:
        for name, weight in weights.items():
            yield Violation(f"data.blend.{name}.weight", weight, "data.phases say the weights", "leave it out, or data.phases")
    elif blend:
        yield from _weights("data.blend", {name: weights.get(name, 1.0) for name in blend}, "weight")


def _phases(config: RunConfig) -> Iterator[Violation]:
    """Phases follow each other and weigh corpora that the blend has."""
    blend, phases, length = config.data.blend, config.data.phases, config.training.sequence_length
    before = 0
    for number, phase in enumerate(phases):
        key, until = f"data.phases.{number}", phase.until_tokens
        for name, weight in phase.weights.items():
            if blend and name not in blend:
                fix = f"choose among {', '.join(sorted(blend))}, or add it to data.blend"
                yield Violation(f"{key}.weights.{name}", weight, "is no corpus of data.blend", fix)
        yield from _weights(f"{key}.weights", phase.weights)
        if number == len(phases) - 1:
            if until is not None:
                yield Violation(f"{key}.until_tokens", until, "the last phase has no end", "leave it out, or add a phase")
        elif until is None or until < before + length:
            why = f"must be at least a sequence ({length} tokens) after the phase's beginning at {before} tokens"
            yield Violation(f"{key}.until_tokens", until, why, "give the phases in order, each with its end")
        before = until or before


def _weights(key: str, weights: dict[str, float], leaf: str = "") -> Iterator[Violation]:
    """Weights of one phase."""
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            where = ".".join(part for part in (key, name, leaf) if part)
            yield Violation(where, weight, "must be a finite number, at least 0", "give its share relative to the others'")
    if not any(weight > 0 for weight in weights.values()):
        yield Violation(key, weights, "gives no corpus any weight", "give at least one a weight above 0")


def _order(key: str, entries: Sequence[WarmupConfig]) -> Iterator[Violation]:
    """Entries of a warm-up end one after the other."""
    before = 0
    for number, entry in enumerate(entries):
        if entry.until_step <= before:
            yield Violation(f"{key}.{number}.until_step", entry.until_step, f"must be after step {before}", "give the entries in order")
        before = entry.until_step
