"""train_tokenizer: text shards -> byte-level BPE tokenizer, a Hugging Face folder. One process works; further ranks have nothing to do."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline import artifact
from pipeline.config.schema import RunConfig
from pipeline.data import tokenizer_training as tokenizer
from pipeline.errors import UserError
from pipeline.files import disk_full_named, make_folder, publish_folder
from pipeline.launch.ranks import Ranks
from pipeline.progress import Progress

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write the folder `tokenizer.path`, learned from the training split of `data.shards`."""
    if ranks.rank > 0:
        return
    wanted, folder, shards = config.tokenizer, Path(config.tokenizer.path), Path(config.data.shards)
    text = artifact.read(shards, key="data.shards", stage="shard")
    settings = {
        "data.shards": artifact.fingerprint(text),
        "tokenizer.vocab_size": wanted.vocab_size,
        "tokenizer.train_megabytes": wanted.train_megabytes,
        "tokenizer.end_of_document": wanted.end_of_document,
    }
    done = artifact.finished(folder, key="tokenizer.path", stage="train_tokenizer", settings=settings)
    if done:
        log.info("train_tokenizer: %s is complete, nothing to do (%s entries)", folder, f"{done.totals['vocab_size']:,}")
        return
    if folder.exists() and any(folder.iterdir()):
        fix = "choose another tokenizer.path; a tokenizer brought along needs no training"
        raise UserError.of("tokenizer.path", folder, "holds files that train_tokenizer did not write", fix)

    make_folder(folder.parent)
    names = [name for name in text.files if name.startswith("train-")]
    artifact.verify_files(shards, text, names)
    learned = min(wanted.train_megabytes * 1e6, text.totals["train"]["bytes"])
    sample = tokenizer.sample([shards / name for name in names], learned / text.totals["train"]["bytes"])
    model = tokenizer.train(_counted(sample, round(learned)), wanted.vocab_size, wanted.end_of_document)
    _publish(model, folder, settings, round(learned))


def _counted(texts: Iterator[str], total: int) -> Iterator[str]:
    """The texts, with progress; learning the merges follows when all are read."""
    with Progress(total, "train_tokenizer: reading", "B") as progress:
        for text in texts:
            yield text
            progress.advance(len(text.encode("utf-8")))
    log.info("train_tokenizer: learning the merges")


def _publish(model: Tokenizer, folder: Path, settings: dict[str, Any], learned: int) -> None:
    """Write the folder under another name and rename it: a tokenizer.json alone would pass for a tokenizer brought along."""
    end_of_document, vocab_size = settings["tokenizer.end_of_document"], model.get_vocab_size()
    if vocab_size < settings["tokenizer.vocab_size"]:
        wanted = settings["tokenizer.vocab_size"]
        log.warning("train_tokenizer: %s bytes of text yield only %s of %s entries", f"{learned:,}", vocab_size, wanted)
    totals = {"vocab_size": vocab_size, "end_of_document": model.token_to_id(end_of_document), "train_bytes": learned}
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with disk_full_named(folder):
        partial.mkdir()
        files = {path.name: artifact.entry(path) for path in tokenizer.save(model, partial, end_of_document)}
        artifact.write(partial, artifact.Manifest("train_tokenizer", settings, files, totals))
    publish_folder(partial, folder)
    log.info("train_tokenizer: wrote %s (%s entries from %.1f MB)", folder, f"{vocab_size:,}", learned / 1e6)
