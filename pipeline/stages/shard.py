"""shard: documents -> text shards, shuffled once, with the same bytes on any number of ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import artifact
from pipeline.config.schema import DataConfig, RunConfig
from pipeline.data import documents, mpi, shuffle, sources, tar
from pipeline.data.mpi import Comm
from pipeline.data.shuffle import Buckets, ShardPlan, Spill
from pipeline.data.sources import Source
from pipeline.data.unfinished import Unfinished, remove_strangers
from pipeline.errors import UserError
from pipeline.files import atomic_file
from pipeline.launch.ranks import Ranks
from pipeline.progress import Progress

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write the folder `data.shards` from the documents of `data.input`."""
    data = config.data
    folder = Path(data.shards)
    with mpi.world(ranks, folder) as comm:
        # One rank looks around and tells the others: a parallel file system should not answer the same questions a thousand times.
        found, settings = comm.bcast(_look(data) if comm.rank == 0 else None)
        unfinished = Unfinished(folder, settings)
        if comm.bcast(_finished(folder, settings, unfinished) if comm.rank == 0 else None):
            return
        spills = _spill(data, found, unfinished, comm)
        for shard in spills["shards"][comm.rank :: comm.size]:
            if unfinished.note(shard["name"]) is None:
                _write_shard(ShardPlan(**shard), folder, [unfinished.folder / name for name in spills["files"]], unfinished)
        comm.barrier()
        if comm.rank == 0:
            _publish(folder, settings, spills, unfinished)


def _look(data: DataConfig) -> tuple[list[Source], dict[str, Any]]:
    """The input files, and all that determines the shards made from them."""
    found = sources.find(data.input, data.suffixes, data.exclude)
    return found, {
        "data.input": sources.fingerprint(found),
        "data.text_field": data.text_field,
        "data.seed": data.seed,
        "data.shard_megabytes": data.shard_megabytes,
        "data.validation_fraction": data.validation_fraction,
    }


def _finished(folder: Path, settings: dict[str, Any], unfinished: Unfinished) -> bool:
    """Whether there is nothing to do; if there is, make the folder ready for it."""
    done = artifact.finished(folder, key="data.shards", stage="shard", settings=settings)
    if done:
        unfinished.clear()
        log.info("shard: %s is complete, nothing to do (%s)", folder, _summary(done.totals))
    else:
        unfinished.take_over()
    return done is not None


def _spill(data: DataConfig, found: list[Source], unfinished: Unfinished, comm: Comm) -> dict[str, Any]:
    """Pass 1: every document to its bucket. Returns the spill files and the shards that they will become."""
    plan = comm.bcast(unfinished.note("plan") if comm.rank == 0 else None)
    if plan:
        return plan
    buckets = Buckets.plan(found, data.shard_megabytes, data.seed, data.validation_fraction)
    spill = Spill(unfinished.folder / f"rank-{comm.rank:05d}.spill", buckets.count)
    mine, empty = sources.share(sources.spans(found), comm.rank, comm.size), 0
    with Progress(sum(span.size for span in mine), "shard: reading", "B", comm.rank) as progress:
        for span in mine:
            for document in documents.read(span, data.text_field):
                if document.text:
                    spill.add(document, *buckets.place(document))
                else:
                    empty += 1
            progress.advance(span.size, span.source.name)
    spill.close()
    gathered = comm.gather((spill.path.name, spill.documents, empty))
    if comm.rank == 0:
        assert gathered is not None
        names, counts, empties = zip(*gathered, strict=True)
        shards = shuffle.plan_shards(buckets, np.sum(counts, axis=0).tolist())
        if not shards:
            rule = f"{len(found)} files hold no document with any text"
            raise UserError.of("data.input", data.input, rule, "name other files, or another data.text_field")
        plan = {"files": names, "shards": [vars(shard) for shard in shards], "empty_documents": sum(empties)}
        unfinished.write("plan", plan)
    return comm.bcast(plan)


def _write_shard(shard: ShardPlan, folder: Path, spills: list[Path], unfinished: Unfinished) -> None:
    """Pass 2: a bucket, sorted, becomes a shard."""
    chosen = shuffle.sorted_bucket(spills, shard.bucket)[shard.first : shard.stop]
    with atomic_file(folder / shard.name) as handle:
        for number, document in enumerate(chosen):
            handle.write(tar.member(f"{number:08d}.txt", document.text))
            handle.write(tar.member(f"{number:08d}.json", document.meta))
        handle.write(tar.END)
    text_bytes = sum(len(document.text) for document in chosen)
    about = {"documents": len(chosen), "text_bytes": text_bytes, "split": shard.name.split("-")[0], "corpus": "default"}
    unfinished.write(shard.name, artifact.entry(folder / shard.name, **about))


def _publish(folder: Path, settings: dict[str, Any], spills: dict[str, Any], unfinished: Unfinished) -> None:
    """All shards are there: write the manifest."""
    files = {shard["name"]: unfinished.note(shard["name"]) for shard in spills["shards"]}
    remove_strangers(folder, "*-?????.tar", set(files))
    totals: dict[str, Any] = {"empty_documents": spills["empty_documents"]}
    for split in ("train", "validation"):
        entries = [entry for name, entry in files.items() if name.startswith(f"{split}-")]
        totals[split] = {
            "shards": len(entries),
            "documents": sum(entry["documents"] for entry in entries),
            "bytes": sum(entry["text_bytes"] for entry in entries),
        }
    artifact.write(folder, artifact.Manifest("shard", settings, files, totals))
    unfinished.clear()
    log.info("shard: wrote %s (%s)", folder, _summary(totals))


def _summary(totals: dict[str, Any]) -> str:
    """The totals for people."""
    parts = []
    for split in ("train", "validation"):
        count = totals[split]
        parts.append(f"{split} {count['documents']:,} documents, {count['bytes'] / 1e6:,.1f} MB, {count['shards']} shards")
    return "; ".join([*parts, f"{totals['empty_documents']:,} empty documents left out"])
