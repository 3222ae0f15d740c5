"""From the configuration to samples: which corpora, in which schedule, how often each is read."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.common import artifact
from pipeline.common.errors import UserError, Violation
from pipeline.common.remote import is_remote, located
from pipeline.config import warmup
from pipeline.config.data import DataConfig
from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig
from pipeline.data.load import removal
from pipeline.data.load.blend_schedule import BlendSchedule, Phase, units
from pipeline.data.load.corpus import Corpus, Windows
from pipeline.data.load.fill_in_the_middle import Infill
from pipeline.data.load.packing import BestFit
from pipeline.data.load.removal import Removal
from pipeline.data.load.samples import Dataset, Samples, too_short
from pipeline.data.load.special_tokens import SpecialTokens
from pipeline.data.load.token_stream import TokenStream
from pipeline.data.load.validation_split import ValidationSamples

log = logging.getLogger("pipeline")


def violations(config: RunConfig) -> list[Violation]:
    """Return what a pretraining job would refuse of its token shards, from their manifests; nothing before all folders are complete."""
    data, problems = config.data, list[Violation]()
    folders = sorted({corpus.tokens or data.tokens for corpus in data.blend.values()} or {data.tokens})
    missing = any(is_remote(folder) or not (Path(folder) / artifact.MANIFEST).is_file() for folder in folders)
    if config.stage.name != "pretrain" or data.pairs.train or missing:
        return []
    try:
        _corpora(data, "train")
    except UserError as error:
        problems += error.violations
    totals = artifact.read(Path(folders[0]), key="data.tokens", stage="tokenize").totals
    return [*problems, *vocabulary_violations(config, int(totals["vocab_size"]))]


def vocabulary_violations(config: RunConfig, vocab_size: int) -> Iterator[Violation]:
    """Yield a violation if the vocabulary of the data is larger than the model's."""
    if vocab_size > config.model.vocab_size:
        rule = f"is less than the vocabulary size {vocab_size} of the token shards in {config.data.tokens}"
        fix = f"set model.vocab_size={vocab_size} or more, or tokenize with a smaller tokenizer"
        yield Violation("model.vocab_size", config.model.vocab_size, rule, fix)


def open_training(config: RunConfig, share: tuple[int, int] = (0, 1), length: int | None = None) -> Samples:
    """The training samples of a run. Opening reads manifests only, so its time does not depend on the number of tokens.

    Args:
        share: (rank, ranks) of the job: ranks share the verification of checksums, and rank 0 checks the file sizes.
        length: tokens from one sample to the next; training.sample_length when None.

    Raises:
        UserError: a folder is not finished, a shard missing or damaged, a corpus unknown or too short.
    """
    data = config.data
    length = length or config.training.sample_length
    corpora = _corpora(data, "train")
    stream = _stream(data.verify, corpora, share)
    if data.remove is not None:
        filler = np.array([corpora[0].totals["end_of_document"]], dtype=stream.dtype).tobytes()
        stream.removal = Removal.of(removal.read(Path(data.remove)), stream.shards, filler)
    sequences: Windows | BestFit
    if data.packing == "best_fit":
        sequences = BestFit(stream, [c.shards for c in corpora], length, corpora[0].totals["end_of_document"])
        log.info("best-fit packing: %s sequences, %.2f %% padding", f"{sequences.counts.sum():,}", 100 * sequences.padding)
    else:
        sequences = Windows(stream, corpora, length)
    for corpus, count in zip(corpora, sequences.counts.tolist(), strict=True):
        if count < 1:
            raise too_short("train", corpus.name or data.tokens, length, corpus.total("tokens"))
    schedule = BlendSchedule(phases(data, config.training.sample_length, sequences.counts.tolist())) if data.blend else None
    runs = np.array([run_of(data, corpus.name) for corpus in corpora], dtype=np.int64)
    for corpus, count, run in zip(corpora, sequences.counts.tolist(), runs.tolist(), strict=True):
        if count < run:
            raise too_short("train", corpus.name, run * length, corpus.total("tokens"))
    return Samples(corpora, stream, sequences, config.training.seed, schedule, _infill(config, corpora[0]), runs)


#: Up to so many epochs, text that is read again trains nearly as well as new text (Muennighoff et al. 2023, "Scaling Data-Constrained
#: Language Models", section 6).
WORTHWHILE_EPOCHS = 4


def check_epochs(data: DataConfig, training: TrainingConfig, samples: Dataset, *, logs: bool = True) -> None:
    """Log how often a run reads each corpus of its blend, or its data if that is more than once, with a warning above four times if `logs`.

    Raises:
        UserError: a corpus is read more often than its max_epochs.
    """
    total = warmup.samples(training, training.steps)
    if samples.schedule is None:
        if total > (count := int(samples.counts[0])):
            level = logging.WARNING if logs and total > WORTHWHILE_EPOCHS * count else logging.INFO
            log.log(level, "data: the run reads its %s samples %.2f times (epochs)%s", f"{count:,}", total / count, repeated(total / count))
        return
    problems = []
    for name, taken, count in zip(sorted(data.blend), samples.schedule.counts(total).tolist(), samples.counts.tolist(), strict=True):
        most = data.blend[name].max_epochs
        share = f"{100 * taken / total:.2f} % of the {total:,} samples of a run with these settings"
        level = logging.WARNING if logs and taken > WORTHWHILE_EPOCHS * count else logging.INFO
        log.log(level, "blend: %s %s, %.3f epochs%s", name, share, taken / count, repeated(taken / count))
        if most is not None and taken > most * count:
            rule = f"the run's {total:,} samples use {taken:,} of it, {taken / count:.3f} epochs of {count:,}"
            fix = f"lower its weight or training.steps={training.steps}, or raise max_epochs to {math.ceil(1000 * taken / count) / 1000:g}"
            problems.append(Violation(f"data.blend.{name}.max_epochs", most, rule, fix))
    UserError.raise_for(problems)


def repeated(epochs: float) -> str:
    """Return what to say of this many epochs; empty for few."""
    return f": above {WORTHWHILE_EPOCHS}, repeated text is worth ever less than new text" if epochs > WORTHWHILE_EPOCHS else ""


def training_tokens(data: DataConfig) -> dict[str, int]:
    """Return the tokens of an epoch of each corpus of the run, "" without a blend; empty if the data is not there or not finished."""
    try:
        return {corpus.name: corpus.total("tokens") for corpus in _corpora(data, "train")}
    except UserError:
        return {}


def open_validation(
    config: RunConfig, share: tuple[int, int] = (0, 1), length: int | None = None, stride: int | None = None
) -> ValidationSamples | None:
    """The concatenated validation splits of all corpora of the run; None if they contain no window.

    Args:
        config, share, length: as in open_training.
        stride: tokens from the begin of a window to that of the next; length when None.

    Raises:
        UserError: as open_training.
    """
    parts = _corpora(config.data, "validation")
    # Two corpora of a blend may be the same shards, which are read once.
    names = {shard.path: part.name or shard.entry["corpus"] for part in reversed(parts) for shard in part.shards}
    shards = {shard.path: shard for part in parts for shard in part.shards}
    corpus = Corpus("", list(shards.values()), parts[0].totals, "")
    return _in_order(config, corpus, [names[path] for path in shards], share, length, stride)


def open_validation_corpora(
    config: RunConfig, share: tuple[int, int] = (0, 1), length: int | None = None, stride: int | None = None
) -> dict[str, ValidationSamples | None]:
    """The validation split of each corpus of the run by name; None for one without a window. Arguments and errors as open_validation."""
    parts = _corpora(config.data, "validation")
    if not config.data.blend:
        names = sorted({shard.entry["corpus"] for shard in parts[0].shards})
        shards = {name: [shard for shard in parts[0].shards if shard.entry["corpus"] == name] for name in names}
        parts = [Corpus(name, shards[name], parts[0].totals, "") for name in names]
    return {part.name: _in_order(config, replace(part, name=""), [part.name] * len(part.shards), share, length, stride) for part in parts}


def _in_order(
    config: RunConfig, corpus: Corpus, names: Sequence[str], share: tuple[int, int], length: int | None, stride: int | None
) -> ValidationSamples | None:
    """The windows of a corpus in order; None if it contains none. `names` are the corpora of its shards."""
    stream = _stream(config.data.verify, [corpus], share)
    windows = Windows(stream, [corpus], length or config.training.sequence_length, stride)
    return ValidationSamples(corpus, stream, windows, names) if windows.counts[0] > 0 else None


def fingerprint(config: RunConfig, samples: Dataset, consumed: int, settings: dict[str, Any]) -> str:
    """A short text that is equal for two runs if their first `consumed` samples are equal.

    Phases that begin later do not count, nor do corpora without weight until then: they may still be changed or added.

    Args:
        consumed: samples that a checkpoint has seen.
        settings: what else determines a sample, from the objective.
    """
    data = config.data
    content: dict[str, Any] = dict(settings)
    if data.packing != "windows":
        content["packing"] = data.packing
    if data.infill.rate > 0:
        content["infill"] = vars(data.infill)
    if not data.blend:
        corpus = samples.corpora[0].fingerprint
        return _hash([corpus, content]) if content else corpus
    fingerprints = {corpus.name: corpus.fingerprint for corpus in samples.corpora}
    begun: list[tuple[Any, ...]] = []
    start = 0
    for phase in phases(data, config.training.sample_length, samples.counts.tolist()):
        end = consumed if phase.end is None else min(phase.end, consumed)
        if start < consumed or not begun:
            weights = {name: unit for name, unit in zip(fingerprints, units(phase.weights), strict=True) if unit}
            begun.append((weights, end) if phase.run == 1 else (weights, end, phase.run))
        start = end
    weighed = {name for weights, *_ in begun for name in weights}
    runs = {name: run for name in sorted(weighed) if (run := run_of(data, name)) > 1}
    return _hash([content, begun, {name: fingerprints[name] for name in sorted(weighed)}, *([runs] if runs else [])])


def _hash(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def run_of(data: DataConfig, name: str) -> int:
    """Samples in a row that are one text of a corpus: those of a sequence of the first phase that reads it."""
    return next((phase.run for phase in data.phases if phase.weights.get(name, 0.0) > 0), 1)


def phases(data: DataConfig, sample_length: int, epoch: Sequence[int] | None = None) -> list[Phase]:
    """The phases of the blend, with ends in samples; corpora are in the order of their names.

    Args:
        sample_length: tokens of a sample.
        epoch: samples of each corpus; required if data.blend_weights compares epochs.
    """
    names = sorted(data.blend)
    worth = dict.fromkeys(names, 1)
    if data.blend_weights == "epochs":
        assert epoch is not None
        worth = dict(zip(names, epoch, strict=True))
    if not data.phases:
        weights = {name: 1.0 if corpus.weight is None else corpus.weight for name, corpus in data.blend.items()}
        return [Phase([weights[name] * worth[name] for name in names])]
    return [
        Phase(
            [phase.weights.get(name, 0.0) * worth[name] for name in names],
            None if phase.until_tokens is None else phase.until_tokens // sample_length,
            phase.run,
        )
        for phase in data.phases
    ]


def _corpora(data: DataConfig, split: str) -> list[Corpus]:
    """The corpora of the run, all tokenized with one tokenizer."""
    if not data.blend:
        folder = Path(data.tokens)
        manifest = artifact.read(located(data.tokens, "data.tokens"), key="data.tokens", stage="tokenize")
        if "training.objective" in manifest.settings:
            rule = "contains packed examples of stage=finetune, not text"
            raise UserError.of("data.tokens", folder, rule, "name a folder that stage=tokenize wrote from data.shards")
        return [Corpus.of(folder, manifest, split)]
    manifests: dict[Path, artifact.Manifest] = {}
    corpora: list[Corpus] = []
    problems: list[Violation] = []
    for name in sorted(data.blend):
        chosen = data.blend[name]
        folder = Path(named := chosen.tokens or data.tokens)
        try:
            if folder not in manifests:
                key = f"data.blend.{name}.tokens" if chosen.tokens else "data.tokens"
                manifests[folder] = artifact.read(located(named, key), key=key, stage="tokenize")
            manifest, wanted = manifests[folder], chosen.corpus or name
            known = sorted({entry["corpus"] for entry in manifest.files.values() if "split" in entry})
            if wanted not in known:
                fix = f"choose one of {', '.join(known)}"
                raise UserError.of(f"data.blend.{name}.corpus", wanted, f"{folder} contains no such corpus", fix)
            corpora.append(Corpus.of(folder, manifest, split, name=name, corpus=wanted))
        except UserError as error:
            problems.extend(error.violations)
    for corpus in corpora:
        if any(corpus.totals.get(key) != corpora[0].totals.get(key) for key in ("tokenizer", "bos")):
            rule = f"was tokenized with another tokenizer or tokenizer.bos than {corpora[0].name}"
            problems.append(
                Violation(
                    f"data.blend.{corpus.name}",
                    data.blend[corpus.name].tokens or data.tokens,
                    rule,
                    "tokenize both with the same tokenizer",
                )
            )
    UserError.raise_for(problems)
    return corpora


def _stream(verify: str, corpora: list[Corpus], share: tuple[int, int]) -> TokenStream:
    """The stream of their shards, verified as data.verify specifies."""
    stream = TokenStream([shard for corpus in corpora for shard in corpus.shards], lazy_checks=verify == "lazy", share=share)
    if share[0] == 0:
        stream.check_sizes()
    if verify == "all":
        stream.verify()
    return stream


def _infill(config: RunConfig, corpus: Corpus) -> Infill | None:
    """Fill-in-the-middle with the sentinel ids of the run's tokenizer; None if it is off."""
    infill = config.data.infill
    if infill.rate == 0:
        return None
    special = SpecialTokens(Path(config.tokenizer.path), corpus.totals["tokenizer"])
    names = ("prefix", "middle", "suffix")
    prefix, middle, suffix = special.find({f"data.infill.{name}": (getattr(infill, name), ()) for name in names})
    end = int(corpus.totals["end_of_document"])
    return Infill(infill.rate, infill.spm_rate, prefix, middle, suffix, end, config.training.seed, corpus.totals.get("bos"))
