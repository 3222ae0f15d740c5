"""train_tokenizer: text shards -> tokenizers as Hugging Face folders with a report. Only rank 0 works."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline.common import artifact, languages
from pipeline.common.artifact import Manifest
from pipeline.common.atomic_files import atomic_folder, digest, make_folder, report_disk_full
from pipeline.common.errors import UserError, collect_errors
from pipeline.common.ranks import Ranks
from pipeline.config.data import TokenizerConfig
from pipeline.config.schema import RunConfig
from pipeline.data.tokenize import tokenizer_import, tokenizer_report, tokenizer_training
from pipeline.data.tokenize.tokenizer import load
from pipeline.data.tokenize.training_text import TrainingText, held_out

log = logging.getLogger("pipeline")

REPORT_MEGABYTES = 1.0
"""Maximum held-out text per language in the report, MB."""

#: Keys that determine a trained tokenizer, in addition to text and vocabulary size.
_TRAINING_KEYS = ("kind", "train_megabytes", "balance", "split", "digits", "whitespace", "end_of_document", "special_tokens", "report")
#: Keys that determine an imported tokenizer, in addition to the file.
_IMPORT_KEYS = ("split", "digits", "end_of_document", "special_tokens")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write the folder `tokenizer.path`, or one subfolder for each of `tokenizer.vocab_sizes`."""
    if ranks.rank == 0:
        (_import if config.tokenizer.source else _train)(config)


def _train(config: RunConfig) -> None:
    """Train the missing tokenizers, measure them and write them."""
    options, folder, shards = config.tokenizer, Path(config.tokenizer.path), Path(config.data.shards)
    text = artifact.read(shards, key="data.shards", stage="shard")
    settings = {"data.shards": artifact.fingerprint(text), **_settings(options, _TRAINING_KEYS)}
    parallel = tokenizer_training.parallel_texts(options.parity)
    if parallel:
        files = languages.by_label(options.parity)
        settings["tokenizer.parity"] = {language: digest(Path(name).expanduser()) for language, name in files.items()}
    folders = {size: folder / str(size) for size in options.vocab_sizes} or {options.vocab_size: folder}
    missing = [size for size, path in folders.items() if not _is_complete(path, {**settings, "tokenizer.vocab_size": size})]
    if not missing:
        return
    for size in missing:
        make_folder(folders[size].parent)  # before the training
    compared = collect_errors(*(lambda other=other: load(Path(other), "tokenizer.compare") for other in options.compare))

    sample = TrainingText(shards, text, options.train_megabytes, options.balance)
    models = tokenizer_training.train_sizes(sample, options, sorted(missing), parallel)
    learned = {language: size for language, size in sorted(sample.languages.items()) if language in parallel or not parallel}
    if sum(learned.values()) < sum(sample.languages.values()):
        others = ", ".join(sorted(sample.languages.keys() - learned)[:10])
        log.warning("train_tokenizer: documents in languages that tokenizer.parity does not name are left out: %s", others)
    for size, model in models.items():
        if model.get_vocab_size() < size:
            count = f"{sample.bytes:,} bytes of text yield only {model.get_vocab_size()}"
            log.warning("train_tokenizer: %s of %s vocabulary entries", count, size)
    measured = {}
    if options.report:
        trained = {_label(folder, folders[size]): models[size] if size in models else load(folders[size]) for size in folders}
        measured = _measure(config, text, trained | dict(zip(options.compare, compared, strict=True)))
    for size, model in models.items():
        totals = {"train_bytes": sum(learned.values()), "train_languages": learned}
        rows = sorted(measured.values(), key=lambda row: row["name"] != _label(folder, folders[size]))  # the tokenizer of this folder first
        _publish(model, folders[size], {**settings, "tokenizer.vocab_size": size}, config, totals, rows)


def _label(folder: Path, path: Path) -> str:
    """Return the name of a tokenizer in the report, independent of the parent folder."""
    return path.relative_to(folder.parent).as_posix()


def _import(config: RunConfig) -> None:
    """Convert the tokenizer file of another library to a Hugging Face folder."""
    options = config.tokenizer
    source, folder = Path(options.source or ""), Path(options.path)
    if not source.is_file():
        raise UserError.of("tokenizer.source", source, "is not a file", "set it to a .tiktoken file, or to a .model file of SentencePiece")
    settings = {"tokenizer.source": digest(source), **_settings(options, _IMPORT_KEYS)}
    if not _is_complete(folder, settings):
        _publish(tokenizer_import.read(source, options), folder, settings, config, {}, [])


def _settings(options: TokenizerConfig, names: tuple[str, ...]) -> dict[str, Any]:
    """Return dotted key -> value of the named options."""
    return {f"tokenizer.{name}": getattr(options, name) for name in names}


def _is_complete(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether the folder already contains this tokenizer.

    Raises:
        UserError: the folder contains another tokenizer, or files that train_tokenizer did not write.
    """
    done = artifact.find_complete(folder, key="tokenizer.path", stage="train_tokenizer", settings=settings)
    if done:
        log.info("train_tokenizer: %s is complete, nothing to do (%s entries)", folder, f"{done.totals['vocab_size']:,}")
    elif folder.exists() and any(folder.iterdir()):
        fix = "set tokenizer.path to another folder; skip this stage to use an existing tokenizer"
        raise UserError.of("tokenizer.path", folder, "contains files that stage=train_tokenizer did not write", fix)
    return done is not None


def _measure(config: RunConfig, text: Manifest, tokenizers: dict[str, Tokenizer]) -> dict[str, tokenizer_report.Measurement]:
    """Return the rows of the report and log them; empty without held-out text."""
    from pipeline.planner.flops import flops_per_token  # imports torch

    texts = held_out(Path(config.data.shards), text, REPORT_MEGABYTES)
    if not texts:
        log.warning("train_tokenizer: no report: %s has no validation split (data.validation_fraction)", config.data.shards)
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
    report: list[tokenizer_report.Measurement],
) -> None:
    """Write the folder atomically: an incomplete folder with a tokenizer.json would be read as an existing tokenizer."""
    end_of_document = config.tokenizer.end_of_document
    make_folder(folder.parent)
    with report_disk_full(folder), atomic_folder(folder) as new:
        written = tokenizer_training.save(model, new, end_of_document)
        if report:
            cost = f"{config.model.family}, {config.model.layers} layers, hidden {config.model.hidden}"
            metadata = {**settings, "operations are of": f"{cost}, sequences of {config.training.sequence_length} tokens"}
            written += tokenizer_report.write(new, report, metadata)
        files = {path.name: artifact.entry(path) for path in written}
        counts = {"vocab_size": model.get_vocab_size(), "end_of_document": model.token_to_id(end_of_document)}
        artifact.write(new, artifact.Manifest("train_tokenizer", settings, files, {**counts, **totals}))
    log.info("train_tokenizer: wrote %s (%s entries)", folder, f"{model.get_vocab_size():,}")
