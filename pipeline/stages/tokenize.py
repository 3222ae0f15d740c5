"""tokenize: text shards -> token shards of the same names, with the same bytes on any number of ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from pipeline import artifact
from pipeline.artifact import Manifest
from pipeline.config.schema import RunConfig
from pipeline.data import mpi, tokens
from pipeline.data.tokenizer import TextEncoder
from pipeline.data.unfinished import Unfinished, remove_strangers
from pipeline.launch.ranks import Ranks
from pipeline.progress import Progress

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write the folder `data.tokens` from the text shards of `data.shards` with the tokenizer of `tokenizer.path`."""
    shards, folder = Path(config.data.shards), Path(config.data.tokens)
    _share_cores(ranks)
    with mpi.world(ranks, folder) as comm:
        # One rank looks first, so that a mistake is reported once.
        text, settings = comm.bcast(_look(config) if comm.rank == 0 else None)
        encoder = _encoder(config)
        unfinished = Unfinished(folder, settings)
        if comm.bcast(_finished(folder, settings, unfinished) if comm.rank == 0 else None):
            return
        mine = [name for name in sorted(text.files)[comm.rank :: comm.size] if unfinished.note(name) is None]
        with Progress(sum(text.files[name]["text_bytes"] for name in mine), "tokenize", "B", comm.rank) as progress:
            for name in mine:
                artifact.verify_files(shards, text, [name])
                whose = {key: text.files[name][key] for key in ("split", "corpus")}
                unfinished.write(name, tokens.write(shards / name, folder / name, encoder, progress.advance) | whose)
        comm.barrier()
        if comm.rank == 0:
            _publish(folder, settings, encoder, {name: unfinished.note(name) for name in text.files}, unfinished)


def _look(config: RunConfig) -> tuple[Manifest, dict[str, Any]]:
    """The text shards, and all that determines the token shards made from them."""
    text = artifact.read(Path(config.data.shards), key="data.shards", stage="shard")
    return text, {
        "data.shards": artifact.fingerprint(text),
        "tokenizer.path": _encoder(config).fingerprint,
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
    }


def _encoder(config: RunConfig) -> TextEncoder:
    return TextEncoder(Path(config.tokenizer.path), config.tokenizer.end_of_document)


def _share_cores(ranks: Ranks) -> None:
    """Let the tokenizer's threads use this rank's part of the machine. Read by `tokenizers` when it first encodes."""
    cores = min(len(os.sched_getaffinity(0)), max(1, (os.cpu_count() or 1) // ranks.local_size))
    os.environ.setdefault("RAYON_NUM_THREADS", str(cores))


def _finished(folder: Path, settings: dict[str, Any], unfinished: Unfinished) -> bool:
    """Whether there is nothing to do; if there is, make the folder ready for it."""
    done = artifact.finished(folder, key="data.tokens", stage="tokenize", settings=settings)
    if done:
        unfinished.clear()
        log.info("tokenize: %s is complete, nothing to do (%s)", folder, _summary(done.totals))
    else:
        unfinished.take_over()
    return done is not None


def _publish(folder: Path, settings: dict[str, Any], encoder: TextEncoder, files: dict[str, Any], unfinished: Unfinished) -> None:
    """All shards are there: write the manifest."""
    remove_strangers(folder, "*-?????.tar", set(files))
    totals: dict[str, Any] = {
        "vocab_size": encoder.vocab_size,
        "end_of_document": encoder.end_of_document,
        "tokenizer": encoder.fingerprint,
        "dtype": encoder.dtype.name,
    }
    for split in ("train", "validation"):
        entries = [entry for name, entry in files.items() if name.startswith(f"{split}-")]
        totals[split] = {
            "shards": len(entries),
            "documents": sum(entry["documents"] for entry in entries),
            "bytes": sum(entry["text_bytes"] for entry in entries),
            "tokens": sum(entry["tokens"] for entry in entries),
        }
    artifact.write(folder, Manifest("tokenize", settings, files, totals))
    unfinished.clear()
    log.info("tokenize: wrote %s (%s)", folder, _summary(totals))


def _summary(totals: dict[str, Any]) -> str:
    """The totals for people."""
    parts = []
    for split in ("train", "validation"):
        count = totals[split]
        per_token = count["bytes"] / max(count["tokens"], 1)
        parts.append(f"{split} {count['tokens']:,} tokens of {count['documents']:,} documents, {per_token:.2f} bytes a token")
    return "; ".join(parts)
