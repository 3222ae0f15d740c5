"""Rules of the group data, as far as they can be checked without opening the data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.common.remote import is_remote
from pipeline.config.data import DataConfig
from pipeline.config.rules import clean
from pipeline.config.schema import RunConfig
from pipeline.config.stages import PARALLEL_STAGES

#: Keys that may not be a URL, and the stages that read or write them.
_NEED_FOLDERS = {
    "data.tokens": ("convert_tokens",),
    "data.shards": ("shard", "train_tokenizer", "tokenize", "convert_tokens"),
    "data.instructions.tokens": ("tokenize", "finetune"),
}
_CORPUS_NAME_RULE = "must consist of a-z, 0-9, '_', '.' and '-', and begin with a letter or a digit"


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules of corpus names; for stages that read a blend, also those of the blend and its phases."""
    yield from _corpora(config.data)
    yield from _urls(config.data, config.stage.name)
    if config.data.select is not None:
        yield from clean.condition_violations("data.select", config.data.select)
    if config.stage.name == "tokenize" and config.data.instructions.tokens is not None:
        yield from _examples(config)
    if config.stage.name in PARALLEL_STAGES:
        yield from _blend(config.data)
        yield from _phases(config.data, config.training.sample_length)


def _examples(config: RunConfig) -> Iterator[Violation]:
    """Packed examples are made of files, for an objective that packs them."""
    if not config.data.instructions.train:
        rule, fix = "names no file to write data.instructions.tokens from", "name .jsonl files, or remove that key to tokenize data.shards"
        yield Violation("data.instructions.train", [], rule, fix)
    if config.training.objective == "classification":
        rule = "reads data.instructions.train directly"
        yield Violation("training.objective", "classification", rule, "leave stage=tokenize out, or choose supervised or dpo")


def _corpora(data: DataConfig) -> Iterator[Violation]:
    """Corpus names are used in file names and document ids."""
    for name in data.corpora:
        if name == "default" or not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name):
            rule = "is the reserved name of the corpus of data.input" if name == "default" else _CORPUS_NAME_RULE
            yield Violation("data.corpora", name, rule, "rename the corpus")


def _urls(data: DataConfig, stage: str) -> Iterator[Violation]:
    """Token shards of a URL are read from copies on the nodes; other shards are in folders."""
    tokens = {"data.tokens": data.tokens, **{f"data.blend.{name}.tokens": corpus.tokens for name, corpus in data.blend.items()}}
    for key, value in {**tokens, "data.shards": data.shards, "data.instructions.tokens": data.instructions.tokens}.items():
        if is_remote(value) and key in tokens and stage in ("pretrain", "plan", "evaluate") and data.stage_in is None:
            fix = "set data.stage_in to a folder on each node, such as /tmp or $TMPDIR"
            yield Violation(key, value, "is a URL, whose shards are read from a copy on each node", fix)
        if is_remote(value) and stage in _NEED_FOLDERS.get(key, ()):
            fix = "name a folder; rclone or `aws s3 sync` copies one to and from object storage"
            yield Violation(key, value, f"is a URL, and stage={stage} needs a folder", fix)


def _blend(data: DataConfig) -> Iterator[Violation]:
    """Weights of data.blend, or of its phases, but not of both."""
    blend, phases = data.blend, data.phases
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


def _phases(data: DataConfig, length: int) -> Iterator[Violation]:
    """Phases are in order and name corpora of the blend."""
    blend, phases = data.blend, data.phases
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
            why = f"must be at least one sample ({length} tokens) after the start of the phase at {before} tokens"
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
