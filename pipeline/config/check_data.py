"""Rules of the data: cleaning, deduplication, tokenizers; blends, their phases, and warm-ups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipeline.config import check_encoder_decoder
from pipeline.config.cleaning import PERSONAL_KINDS, STEPS
from pipeline.config.data import WarmupConfig
from pipeline.config.schema import RunConfig
from pipeline.errors import Violation

#: Stages that read training samples.
TRAINING_STAGES = ("pretrain", "evaluate")


def violations(config: RunConfig) -> Iterator[Violation]:
    """Every broken rule, as far as it shows without opening the data."""
    stage = config.stage.name
    if stage == "shard":
        yield from _clean(config)
        yield from _dedup(config)
    elif stage == "train_tokenizer":
        yield from _tokenizer(config)
    elif stage in TRAINING_STAGES:
        yield from _blend(config)
        yield from _phases(config)
        yield from _warmup(config)
        if config.model.objective == "masked":
            yield from _masked(config)
        if config.model.objective in ("span_corruption", "pairs"):
            yield from check_encoder_decoder.violations(config)


def _clean(config: RunConfig) -> Iterator[Violation]:
    """Steps and kinds of personal data are names of a list, which a knob cannot hold against its choices."""
    clean = config.clean
    for key, names, known in (("clean.steps", clean.steps, STEPS), ("clean.personal.kinds", clean.personal.kinds, PERSONAL_KINDS)):
        for name in names:
            if name not in known:
                yield Violation(key, name, "is unknown", "choose " + ", ".join(known))
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Violation(key, name, "is named twice", "leave one out")
    for key, values, count in (("top_ngrams", clean.repetition.top_ngrams, 3), ("long_ngrams", clean.repetition.long_ngrams, 6)):
        if len(values) != count:
            yield Violation(
                f"clean.repetition.{key}", values, f"has {len(values)} shares, not {count}", f"give {count} numbers from 0 to 1"
            )


def _dedup(config: RunConfig) -> Iterator[Violation]:
    """Bands must find what the threshold asks for, and signatures of other corpora serve only what looks for duplicates."""
    dedup = config.dedup
    found = 1 - (1 - dedup.threshold**dedup.rows) ** dedup.bands
    if dedup.near and found < 0.5:
        why = f"with dedup.bands={dedup.bands} finds {found:.0%} of the pairs at dedup.threshold={dedup.threshold}"
        yield Violation("dedup.rows", dedup.rows, why, "use fewer rows, more bands or a higher threshold, to find at least half")
    for key, value in (("dedup.against", dedup.against), ("dedup.save_signatures", dedup.save_signatures)):
        if value and not (dedup.exact and dedup.near):
            yield Violation(key, value, "needs dedup.exact and dedup.near", f"set both to true, or leave {key} out")


def _tokenizer(config: RunConfig) -> Iterator[Violation]:
    """What a kind of tokenizer cannot do."""
    wanted = config.tokenizer
    key = "tokenizer.vocab_sizes" if wanted.vocab_sizes else "tokenizer.vocab_size"
    runs = 45 if wanted.whitespace == "runs" else 0
    least = {"bpe": 257, "unigram": 512, "wordpiece": 512}[wanted.kind] + len(wanted.special_tokens) + runs
    for size in wanted.vocab_sizes or [wanted.vocab_size]:
        if size < least:
            yield Violation(
                key, size, f"leaves nothing to learn: {wanted.kind} with these settings needs {least}", f"choose {least} or more"
            )
    if len(set(wanted.vocab_sizes)) < len(wanted.vocab_sizes):
        yield Violation(key, wanted.vocab_sizes, "names a size twice", "name each once")
    if wanted.split != "gpt2" and wanted.kind != "bpe":
        yield Violation("tokenizer.split", wanted.split, f"is BPE's; {wanted.kind} has a split of its own", "leave it out, or train bpe")
    if wanted.digits == "groups_of_three" and wanted.kind == "unigram":
        yield Violation("tokenizer.digits", wanted.digits, "SentencePiece's Unigram learns no such groups", "use single, or train bpe")
    if wanted.whitespace == "runs" and wanted.kind == "wordpiece":
        yield Violation("tokenizer.whitespace", "runs", "wordpiece drops whitespace", "leave it out, or train bpe or unigram")


def _warmup(config: RunConfig) -> Iterator[Violation]:
    """Warm-ups are in order, and short sequences are equal parts of whole ones."""
    training = config.training
    for name in ("sequence_warmup", "batch_rampup"):
        yield from _order(f"training.{name}", getattr(training, name))
    for number, entry in enumerate(training.sequence_warmup):
        if training.sequence_length % entry.value or entry.value < 2:
            why = f"must divide training.sequence_length={training.sequence_length} and be at least 2: each sample is cut into equal parts"
            yield Violation(f"training.sequence_warmup.{number}.value", entry.value, why, "choose such a length")


def _masked(config: RunConfig) -> Iterator[Violation]:
    """Masked language models read whole sequences with special tokens of their own."""
    training, masking = config.training, config.data.masking
    if masking.random + masking.keep > 1:
        why = f"and data.masking.keep={masking.keep} are more than all"
        yield Violation("data.masking.random", masking.random, why, "lower one of them")
    if config.data.infill.rate > 0:
        why = "puts documents together anew for models that predict the next token"
        yield Violation("data.infill.rate", config.data.infill.rate, why, "leave it out, or choose another model")
    if training.sequence_warmup:
        why = "cuts samples into parts; a masked sequence is whole, with special tokens around it"
        yield Violation("training.sequence_warmup", f"{len(training.sequence_warmup)} entries", why, "leave it out")
    paired = config.model.next_sentence
    least = 5 if paired else 3
    if training.sequence_length < least:
        why = f"has no room for text between the special tokens, which takes {least}"
        yield Violation("training.sequence_length", training.sequence_length, why, f"choose {least} or more")
    if paired and training.document_mask:
        why = "would hide the second sentence, which may come from another document"
        yield Violation("training.document_mask", True, why, "leave it out, or set model.next_sentence=false")
    if paired and config.parallel.context > 1:
        why = "cuts sequences; the first token, which tells of the next sentence, is then on some ranks alone"
        yield Violation("parallel.context", config.parallel.context, why, "use 1, or model.next_sentence=false")


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
