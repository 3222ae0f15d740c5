"""tokenize: text shards -> token shards with the same names; or files of examples -> shards of packed examples, for finetune.

The output is byte-identical for any number of ranks.
"""

from __future__ import annotations

import logging
import tempfile
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.common import artifact, mpi
from pipeline.common.artifact import Manifest
from pipeline.common.errors import UserError, collect_errors
from pipeline.common.progress import SharedProgress
from pipeline.common.ranks import Ranks
from pipeline.common.remote import RemotePath, is_remote, located
from pipeline.common.unfinished import Unfinished, work
from pipeline.config.schema import RunConfig
from pipeline.data.load import prepare_examples
from pipeline.data.read import documents
from pipeline.data.shard import text_shards
from pipeline.data.tokenize import encoders, token_shards
from pipeline.data.tokenize.tokenizer import TextEncoder

#: Documents of which at least one has each field of data.select.
FIRST = 1000

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write `data.tokens` from the text shards of `data.shards`, or `data.instructions.tokens` from the files of that group."""
    if config.data.instructions.tokens is not None:
        mpi.share_cores(ranks)
        with mpi.world(ranks, Path(config.data.instructions.tokens)) as comm:
            prepare_examples.run(config, comm)
        return
    shards, of_url = Path(config.data.shards), is_remote(config.data.tokens)
    tokenizer = Path(config.tokenizer.path), config.tokenizer.end_of_document, config.tokenizer.bos
    mpi.share_cores(ranks)
    with mpi.world(ranks, Path(tempfile.gettempdir() if of_url else config.data.tokens)) as comm:
        folder = located(config.data.tokens, "data.tokens")
        with suppress(UserError):  # all ranks load it in parallel; on failure, rank 0 reports the error in _read_inputs
            _encoder(*tokenizer)
        text, settings = comm.bcast(_read_inputs(shards, config.data.select, *tokenizer) if comm.rank == 0 else None)
        encoder = _encoder(*tokenizer)
        with work(comm, folder, ("data.tokens", "tokenize"), settings, _summary, ["*-?????.tar"]) as unfinished:
            if not unfinished:
                return
            sizes = {name: entry["text_bytes"] for name, entry in text.files.items() if "split" in entry}
            entries = {name: unfinished.note(name) for name in token_shards.share(sizes, comm.rank, comm.size)}
            mine = [name for name, entry in entries.items() if entry is None]
            engine = encoders.choose(config.tokenizer.engine, encoder, lambda: token_shards.excerpts(shards, text, mine))
            total = sum(comm.allgather(sum(sizes[name] for name in mine)))
            with SharedProgress(comm, total, "tokenize", "B") as progress:
                for name in mine:
                    entries[name] = token_shards.write(shards, text, name, folder / name, encoder, engine, progress.advance, settings)
                    unfinished.write(name, entries[name])
            gathered = comm.gather(entries)
            if gathered is not None:
                written = {name: entry for of_rank in gathered for name, entry in of_rank.items()}
                entries = {name: written[name] for name in sizes}
                if config.data.select is not None and not any(entry["documents"] for entry in entries.values()):
                    unfinished.clear()  # nothing of this run can be continued
                    fix = "the fields are those of the documents of data.shards"
                    if "score_rank" in config.data.select:
                        fix = "score_rank is the part of the documents of its language with a lower score, in steps of 0.01, 0.99 at most"
                    raise UserError.of("data.select", config.data.select, "chooses none of the documents", fix)
                _publish(folder, settings, encoder, entries, unfinished)


_encoder = cache(TextEncoder)


def _read_inputs(shards: Path, select: str | None, tokenizer: Path, end_of_document: str, bos: str) -> tuple[Manifest, dict[str, Any]]:
    """Return the manifest of the text shards, and all settings that determine the token shards.

    Raises:
        UserError: one of the inputs cannot be read, or no document has the fields that data.select reads.
    """
    text, encoder = collect_errors(
        lambda: artifact.read(shards, key="data.shards", stage="shard"),
        lambda: _encoder(tokenizer, end_of_document, bos),
    )
    if select is not None:
        _check_fields(shards, select, text)
    return text, {
        "data.shards": artifact.fingerprint(text),
        "tokenizer.path": encoder.fingerprint,
        "tokenizer.end_of_document": end_of_document,
        **({} if select is None else {"data.select": select}),
        **({} if encoder.bos is None else {"tokenizer.bos": "document"}),  # none: as before there was a choice
    }


def _check_fields(shards: Path, select: str, text: Manifest) -> None:
    """Refuse a condition on a field that none of the first documents has; raises UserError."""
    selection = text_shards.Selection(select, text)
    name = next(name for name, entry in sorted(text.files.items()) if "split" in entry)
    records = [record for _, record in islice(text_shards.readable(shards, text, name), FIRST)]
    absent = set.intersection(*(set(selection.missing(record)) for record in records)) if records else ()
    for field in sorted(absent):
        known = ", ".join(sorted({name for record in records for name in documents.fields(record)}))
        fix = "add score to clean.steps of stage=shard, and name its model" if field == "score_rank" else f"they have {known}"
        raise UserError.of("data.select", select, f"reads {field}, which the first {len(records)} documents of {shards} do not have", fix)


def _publish(
    folder: Path | RemotePath, settings: dict[str, Any], encoder: TextEncoder, files: dict[str, Any], unfinished: Unfinished
) -> None:
    """Write the manifest after all shards are complete."""
    totals = {**encoder.totals, "dtype": encoder.dtype.name, **token_shards.totals(files)}
    artifact.write(folder, Manifest("tokenize", settings, files, totals))
    unfinished.clear()
    log.info("tokenize: wrote %s (%s)", folder, _summary(totals))


def _summary(totals: dict[str, Any]) -> str:
    """Format the totals for the log."""
    parts = []
    for split in ("train", "validation"):
        count = totals[split]
        per_token = count["bytes"] / max(count["tokens"], 1)
        parts.append(f"{split} {count['tokens']:,} tokens in {count['documents']:,} documents, {per_token:.2f} bytes per token")
    return "; ".join(parts)
