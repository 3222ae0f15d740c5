"""train_tokenizer: text shards -> tokenizers, each a Hugging Face folder with a report. One process works, further ranks do nothing."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline import artifact
from pipeline.artifact import Manifest
from pipeline.config.data import TokenizerConfig
from pipeline.config.schema import RunConfig
from pipeline.data.tokenize import tokenizer_import, tokenizer_report, tokenizer_training
from pipeline.data.tokenize.tokenizer import load
from pipeline.data.tokenize.tokenizer_sample import Sample, held_out
from pipeline.errors import UserError, collect_errors
from pipeline.files import atomic_folder, digest, make_folder, report_disk_full
from pipeline.launch.ranks import Ranks
from pipeline.progress import Progress

log = logging.getLogger("pipeline")

REPORT_MEGABYTES = 1.0
"""Held-out text of each language that is measured, at most."""

#: Keys that determine a trained tokenizer, besides the text and the size.
_TRAINED_BY = ("kind", "train_megabytes", "balance", "split", "digits", "whitespace", "end_of_document", "special_tokens", "report")
#: Keys that determine an imported one, besides the file.
_IMPORTED_BY = ("split", "digits", "end_of_document", "special_tokens")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write the folder `tokenizer.path`, or one below it for each of `tokenizer.vocab_sizes`."""
    if ranks.rank == 0:
        (_import if config.tokenizer.source else _train)(config)


def _train(config: RunConfig) -> None:
    """Learn what is missing, measure it, publish it."""
    wanted, folder, shards = config.tokenizer, Path(config.tokenizer.path), Path(config.data.shards)
    text = artifact.read(shards, key="data.shards", stage="shard")
    settings = {"data.shards": artifact.fingerprint(text), **_settings(wanted, _TRAINED_BY)}
    folders = {size: folder / str(size) for size in wanted.vocab_sizes} or {wanted.vocab_size: folder}
    missing = [size for size, place in folders.items() if not _finished(place, {**settings, "tokenizer.vocab_size": size})]
    if not missing:
        return
    others = collect_errors(*(lambda other=other: load(Path(other), "tokenizer.compare") for other in wanted.compare))

    sample = Sample(shards, text, wanted.train_megabytes, wanted.balance)
    models = _learned(sample, wanted, sorted(missing))
    for size, model in models.items():
        if model.get_vocab_size() < size:
            count = f"{sample.bytes:,} bytes of text yield only {model.get_vocab_size()}"
            log.warning("train_tokenizer: %s of %s entries", count, size)
    measured = {}
    if wanted.report:
        named = {_label(folder, folders[size]): models[size] if size in models else load(folders[size]) for size in folders}
        measured = _measured(config, text, named | dict(zip(wanted.compare, others, strict=True)))
    for size, model in models.items():
        totals = {"train_bytes": sum(sample.languages.values()), "train_languages": dict(sorted(sample.languages.items()))}
        rows = sorted(measured.values(), key=lambda row: row["name"] != _label(folder, folders[size]))  # its own first
        _publish(model, folders[size], {**settings, "tokenizer.vocab_size": size}, config, totals, rows)


def _label(folder: Path, place: Path) -> str:
    """What the report calls a tokenizer: the same wherever the folder lies."""
    return place.relative_to(folder.parent).as_posix()


def _import(config: RunConfig) -> None:
    """Turn another library's file into a Hugging Face folder."""
    wanted = config.tokenizer
    source, folder = Path(wanted.source or ""), Path(wanted.path)
    if not source.is_file():
        raise UserError.of("tokenizer.source", source, "is no file", "name a .tiktoken file, or a .model file of SentencePiece")
    settings = {"tokenizer.source": digest(source), **_settings(wanted, _IMPORTED_BY)}
    if not _finished(folder, settings):
        _publish(tokenizer_import.read(source, wanted), folder, settings, config, {}, [])


def _settings(wanted: TokenizerConfig, names: tuple[str, ...]) -> dict[str, Any]:
    return {f"tokenizer.{name}": getattr(wanted, name) for name in names}


def _finished(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether a tokenizer is there already.

    Raises:
        UserError: another one is, or files that are none of ours.
    """
    done = artifact.find_complete(folder, key="tokenizer.path", stage="train_tokenizer", settings=settings)
    if done:
        log.info("train_tokenizer: %s is complete, nothing to do (%s entries)", folder, f"{done.totals['vocab_size']:,}")
    elif folder.exists() and any(folder.iterdir()):
        fix = "choose another tokenizer.path; a tokenizer brought along needs no training"
        raise UserError.of("tokenizer.path", folder, "holds files that train_tokenizer did not write", fix)
    return done is not None


def _learned(sample: Sample, wanted: TokenizerConfig, sizes: list[int]) -> dict[int, Tokenizer]:
    """A tokenizer of each size. Those of BPE are the largest one's beginnings."""

    def texts() -> Iterator[str]:
        with Progress(sample.bytes, "train_tokenizer: reading", "B") as progress:
            for text in sample:
                yield text
                progress.advance(len(text.encode("utf-8")))
        log.info("train_tokenizer: learning from %.1f MB", sum(sample.languages.values()) / 1e6)

    if wanted.kind == "bpe":
        largest = tokenizer_training.train(texts, wanted, sizes[-1])
        return {size: tokenizer_training.truncate_vocab(largest, size) if size < sizes[-1] else largest for size in sizes}
    return {size: tokenizer_training.train(texts, wanted, size) for size in sizes}


def _measured(config: RunConfig, text: Manifest, tokenizers: dict[str, Tokenizer]) -> dict[str, tokenizer_report.Row]:
    """The rows of the report, also told to the log; none without held-out text."""
    from pipeline.planner.flops import flops_per_token  # loads torch

    texts = held_out(Path(config.data.shards), text, REPORT_MEGABYTES)
    if not texts:
        log.warning("train_tokenizer: no report, %s has no validation split (data.validation_fraction)", config.data.shards)
        return {}

    def cost(vocab_size: int) -> float:
        return flops_per_token(dataclasses.replace(config.model, vocab_size=vocab_size), config.training.sequence_length)

    rows = {name: tokenizer_report.measure(name, tokenizer, texts, cost) for name, tokenizer in tokenizers.items()}
    log.info("train_tokenizer: on held-out text\n%s", tokenizer_report.text_table(list(rows.values())))
    return rows


def _publish(
    model: Tokenizer,
    folder: Path,
    settings: dict[str, Any],
    config: RunConfig,
    totals: dict[str, Any],
    report: list[tokenizer_report.Row],
) -> None:
    """Write the folder under another name and rename it: a tokenizer.json alone would pass for a tokenizer brought along."""
    end_of_document = config.tokenizer.end_of_document
    make_folder(folder.parent)
    with report_disk_full(folder), atomic_folder(folder) as new:
        written = tokenizer_training.save(model, new, end_of_document)
        if report:
            cost = f"{config.model.family}, {config.model.layers} layers, hidden {config.model.hidden}"
            about = {**settings, "operations are of": f"{cost}, sequences of {config.training.sequence_length} tokens"}
            written += tokenizer_report.write(new, report, about)
        files = {path.name: artifact.entry(path) for path in written}
        counts = {"vocab_size": model.get_vocab_size(), "end_of_document": model.token_to_id(end_of_document)}
        artifact.write(new, artifact.Manifest("train_tokenizer", settings, files, {**counts, **totals}))
    log.info("train_tokenizer: wrote %s (%s entries)", folder, f"{model.get_vocab_size():,}")
