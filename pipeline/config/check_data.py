"""Configuration rules of the data stages: cleaning, deduplication, tokenizers; blends, their phases, and warm-ups."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.common.errors import Violation
from pipeline.config.cleaning import PERSONAL_KINDS, STEPS
from pipeline.config.data import WarmupConfig
from pipeline.config.schema import RunConfig
from pipeline.config.stages import PARALLEL_STAGES


def violations(config: RunConfig) -> Iterator[Violation]:
    """The rules that a configuration breaks, as far as they can be checked without opening the data."""
    stage = config.stage.name
    if stage == "shard":
        yield from _clean(config)
        yield from _dedup(config)
    elif stage == "train_tokenizer":
        yield from _tokenizer(config)
    elif stage in PARALLEL_STAGES:
        yield from _blend(config)
        yield from _phases(config)
        yield from _warmup(config)


def _clean(config: RunConfig) -> Iterator[Violation]:
    """Names in the lists of steps and of kinds of personal data, which a knob cannot check."""
    clean = config.clean
    for key, names, known in (("clean.steps", clean.steps, STEPS), ("clean.personal.kinds", clean.personal.kinds, PERSONAL_KINDS)):
        for name in names:
            if name not in known:
                yield Violation(key, name, "is unknown", "choose " + ", ".join(known))
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Violation(key, name, "is listed twice", "remove one")
    for name in ("length", "gopher", "c4", "fineweb", "repetition"):
        yield from _by_language(getattr(clean, name), name)
    for key, values, count in (("top_ngrams", clean.repetition.top_ngrams, 3), ("long_ngrams", clean.repetition.long_ngrams, 6)):
        if len(values) != count:
            yield Violation(
                f"clean.repetition.{key}", values, f"has {len(values)} entries, not {count}", f"give {count} numbers from 0 to 1"
            )


def _by_language(step: Any, name: str) -> Iterator[Violation]:
    """The keys and values of `clean.STEP.by_language`, which a knob cannot check."""
    knobs = {field.name: field.metadata["knob"] for field in dataclasses.fields(step) if field.name != "by_language"}
    for language, values in step.by_language.items():
        key = f"clean.{name}.by_language.{language}"
        if not isinstance(values, Mapping):
            yield Violation(key, values, "is not a mapping of keys to values", f"write {{{language}: {{KEY: VALUE}}}}")
            continue
        for wanted, value in values.items():
            if wanted not in knobs:
                yield Violation(f"{key}.{wanted}", value, "is unknown", "choose " + ", ".join(knobs))
                continue
            general = getattr(step, wanted)
            count = len(general) if isinstance(general, Sequence) else 0
            numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            if len(numbers) != max(1, count) or not all(
                type(number) in (int, float) and not knobs[wanted].violated(number) for number in numbers
            ):
                rule = " ".join([f"{count} numbers" if count else "a number", knobs[wanted].rule()]).strip()
                yield Violation(f"{key}.{wanted}", value, f"must be {rule}", f"set it to a legal value ({knobs[wanted].meaning})")


def _dedup(config: RunConfig) -> Iterator[Violation]:
    """Bands must find most pairs at the threshold; signatures of other corpora need exact and near deduplication."""
    dedup = config.dedup
    found = 1 - (1 - dedup.threshold**dedup.rows) ** dedup.bands
    if dedup.near and found < 0.5:
        why = f"with dedup.bands={dedup.bands} finds {found:.0%} of the pairs at dedup.threshold={dedup.threshold}"
        yield Violation("dedup.rows", dedup.rows, why, "use fewer rows, more bands or a higher threshold, to find at least half")
    for key, value in (("dedup.against", dedup.against), ("dedup.save_signatures", dedup.save_signatures)):
        if value and not (dedup.exact and dedup.near):
            yield Violation(key, value, "needs dedup.exact and dedup.near", f"set both to true, or leave {key} out")


def _tokenizer(config: RunConfig) -> Iterator[Violation]:
    """Limits of each kind of tokenizer."""
    wanted = config.tokenizer
    key = "tokenizer.vocab_sizes" if wanted.vocab_sizes else "tokenizer.vocab_size"
    runs = 45 if wanted.whitespace == "runs" else 0
    least = {"bpe": 257, "unigram": 512, "wordpiece": 512}[wanted.kind] + len(wanted.special_tokens) + runs
    for size in wanted.vocab_sizes or [wanted.vocab_size]:
        if size < least:
            yield Violation(
                key, size, f"leaves nothing to learn: {wanted.kind} with these settings needs at least {least}", f"choose {least} or more"
            )
    if len(set(wanted.vocab_sizes)) < len(wanted.vocab_sizes):
        yield Violation(key, wanted.vocab_sizes, "contains a size twice", "list each size once")
    if wanted.split != "gpt2" and wanted.kind != "bpe":
        yield Violation(
            "tokenizer.split",
            wanted.split,
            f"applies to bpe only; {wanted.kind} has its own pre-tokenization",
            "leave it out, or train bpe",
        )
    if wanted.digits == "groups_of_three" and wanted.kind == "unigram":
        yield Violation("tokenizer.digits", wanted.digits, "is not supported by SentencePiece's Unigram", "use single, or train bpe")
    if wanted.whitespace == "runs" and wanted.kind == "wordpiece":
        yield Violation(
            "tokenizer.whitespace", "runs", "is not supported by wordpiece, which drops whitespace", "leave it out, or train bpe or unigram"
        )


def _warmup(config: RunConfig) -> Iterator[Violation]:
    """Warm-up entries are in order, and short sequences divide the full sequence length."""
    training = config.training
    for name in ("sequence_warmup", "batch_rampup"):
        yield from _order(f"training.{name}", getattr(training, name))
    for number, entry in enumerate(training.sequence_warmup):
        if training.sequence_length % entry.value or entry.value < 2:
            why = (
                f"must divide training.sequence_length={training.sequence_length} and be at least 2: each sample is split into equal parts"
            )
            yield Violation(f"training.sequence_warmup.{number}.value", entry.value, why, "choose such a length")


def _blend(config: RunConfig) -> Iterator[Violation]:
    """Weights of data.blend, or of its phases, but not of both."""
    blend, phases = config.data.blend, config.data.phases
    weights = {name: corpus.weight for name, corpus in blend.items() if corpus.weight is not None}
    if phases and not blend:
        yield Violation(
            "data.phases",
            f"{len(phases)} phases",
            "assign weights to the corpora of data.blend, which is empty",
            "add the corpora to data.blend",
        )
    elif phases:
        for name, weight in weights.items():
            yield Violation(
                f"data.blend.{name}.weight", weight, "conflicts with data.phases, which sets the weights", "remove it, or data.phases"
            )
    elif blend:
        yield from _weights("data.blend", {name: weights.get(name, 1.0) for name in blend}, "weight")


def _phases(config: RunConfig) -> Iterator[Violation]:
    """Phases are in order and name corpora of the blend."""
    blend, phases, length = config.data.blend, config.data.phases, config.training.sequence_length
    before = 0
    for number, phase in enumerate(phases):
        key, until = f"data.phases.{number}", phase.until_tokens
        for name, weight in phase.weights.items():
            if blend and name not in blend:
                fix = f"choose among {', '.join(sorted(blend))}, or add it to data.blend"
                yield Violation(f"{key}.weights.{name}", weight, "is not a corpus of data.blend", fix)
        yield from _weights(f"{key}.weights", phase.weights)
        if number == len(phases) - 1:
            if until is not None:
                yield Violation(f"{key}.until_tokens", until, "the last phase has no end", "remove it, or add a phase")
        elif until is None or until < before + length:
            why = f"must be at least one sequence ({length} tokens) after the start of the phase at {before} tokens"
            yield Violation(f"{key}.until_tokens", until, why, "list the phases in order, each with its end")
        before = until or before


def _weights(key: str, weights: dict[str, float], leaf: str = "") -> Iterator[Violation]:
    """Weights of one phase."""
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            where = ".".join(part for part in (key, name, leaf) if part)
            yield Violation(where, weight, "must be a finite number, at least 0", "set its share relative to the other corpora")
    if not any(weight > 0 for weight in weights.values()):
        yield Violation(key, weights, "gives no corpus a weight above 0", "give at least one corpus a weight above 0")


def _order(key: str, entries: Sequence[WarmupConfig]) -> Iterator[Violation]:
    """Entries of a warm-up have increasing ends."""
    before = 0
    for number, entry in enumerate(entries):
        if entry.until_step <= before:
            yield Violation(f"{key}.{number}.until_step", entry.until_step, f"must be after step {before}", "list the entries in order")
        before = entry.until_step
