"""shard: documents -> clean, deduplicated, shuffled text shards, with the same bytes on any number of ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import artifact, knobs
from pipeline.config.schema import RunConfig
from pipeline.data import mpi
from pipeline.data.clean.cleaner import Cleaner
from pipeline.data.dedup import clusters, duplicates, signatures
from pipeline.data.dedup.clusters import Clusters
from pipeline.data.mpi import Comm
from pipeline.data.read import sources
from pipeline.data.read.documents import DEFAULT_CORPUS, Bad, ReadOptions
from pipeline.data.read.sources import Part
from pipeline.data.shard import shards
from pipeline.data.shard.part import PartCounts, process
from pipeline.data.shard.pool import Pool
from pipeline.data.shard.shuffle import Order, ShardPlan, plan_shards
from pipeline.data.shared_progress import SharedProgress
from pipeline.data.unfinished import Unfinished, claimed, work
from pipeline.errors import UserError
from pipeline.files import atomic_file
from pipeline.launch import ranks as launch_ranks
from pipeline.launch.ranks import Ranks

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write the folder `data.shards` from the documents of `data.input` and `data.corpora`."""
    folder, array = Path(config.data.shards), launch_ranks.array_task()
    mpi.share_cores(ranks)
    with mpi.world(ranks, folder) as comm:
        # One rank looks around and tells the others: a parallel file system should not answer the same questions a thousand times.
        parts, bad, settings = comm.bcast(_look(config) if comm.rank == 0 else None)
        cleaner = Cleaner(config.clean)
        with work(comm, folder, ("data.shards", "shard"), settings, _summary, array.job if array else None) as unfinished:
            if not unfinished:
                return
            job = _Job(config, comm, folder, parts, unfinished)
            job.read(cleaner, *((array.index, array.size) if array else (comm.rank, comm.size)))
            if array and not job.all_read():
                log.info("shard: this task's share is done; the last task of the job array goes on with all of them")
                return
            # Of a job array whose last tasks end at one time, one goes on.
            with claimed(unfinished.folder, "data.shards") if array else contextlib.nullcontext():
                job.write(bad)


class _Job:
    """The passes of one run: every part is read, cleaned and spilled; all are deduplicated together; shards are filled from them."""

    def __init__(self, config: RunConfig, comm: Comm, folder: Path, parts: list[Part], unfinished: Unfinished) -> None:
        data = config.data
        self._config, self._comm, self._folder, self._parts, self._unfinished = config, comm, folder, parts, unfinished
        size = sum(part.cost for part in parts)
        corpora = [span.source.corpus for part in parts for span in part.spans]
        self._order = Order.plan(corpora, size, data.shard_megabytes, data.seed, data.validation_fraction)

    def _stem(self, part: Part) -> Path:
        return self._unfinished.folder / _name(part)

    def read(self, cleaner: Cleaner, index: int, size: int) -> None:
        """Pass 1: this rank's parts, those that an earlier run finished left out."""
        mine = [part for part in sources.share(self._parts, index, size) if self._unfinished.note(_name(part)) is None]
        options, dedup = ReadOptions.of(self._config.data), self._config.dedup
        total = sum(self._comm.allgather(sum(part.size for part in mine)))
        with SharedProgress(self._comm, total, "shard: reading", "B") as progress:
            for part in mine:
                counts = process(part, self._stem(part), options, cleaner, self._order, dedup, progress.advance)
                self._unfinished.write(_name(part), counts.to_json())
        self._comm.barrier()

    def all_read(self) -> bool:
        """Whether every part is spilled, by whomever."""
        return all(self._unfinished.note(_name(part)) is not None for part in self._parts)

    def write(self, bad: list[Bad]) -> None:
        """Passes 2 and 3: duplicates, then shards, report and manifest."""
        notes = self._comm.bcast([self._unfinished.note(_name(part)) for part in self._parts] if self._comm.rank == 0 else None)
        counts = PartCounts(bad=[[entry.source, entry.position, entry.reason] for entry in bad])
        for note in notes:
            counts.add(PartCounts.from_json(note))
        _check_quarantine(counts, self._config)
        pool = Pool([self._stem(part) for part in self._parts], [note["runs"] for note in notes])
        found, plan = self._planned(pool, counts)
        for shard in plan[self._comm.rank :: self._comm.size]:
            if self._unfinished.note(shard.name) is None:
                noted = shards.write(self._folder, shard, pool, found.drop, self._config)
                self._unfinished.write(shard.name, noted)
        self._comm.barrier()
        if self._comm.rank == 0:
            written = {shard.name: self._unfinished.note(shard.name) for shard in plan}
            totals = shards.publish(self._folder, self._unfinished.settings, written, counts, found, pool)
            self._unfinished.clear()
            log.info("shard: wrote %s (%s)", self._folder, _summary(totals))

    def _planned(self, pool: Pool, counts: PartCounts) -> tuple[Clusters, list[ShardPlan]]:
        """What to leave out and which shards the rest becomes; taken from an interrupted run if that came so far."""
        noted = self._comm.bcast(self._unfinished.note("plan") if self._comm.rank == 0 else None)
        dropped = self._unfinished.folder / "drop.npy"
        if noted:
            return clusters.from_json(noted["found"], np.load(dropped)), [ShardPlan(**shard) for shard in noted["shards"]]
        found = self._duplicates(pool)
        plan = self._plan(pool, found, counts)
        if self._comm.rank == 0:
            with atomic_file(dropped) as handle:
                np.save(handle, found.drop)
            self._unfinished.write("plan", {"found": clusters.to_json(found), "shards": [vars(shard) for shard in plan]})
        return found, plan

    def _duplicates(self, pool: Pool) -> Clusters:
        """What to leave out."""
        dedup, comm = self._config.dedup, self._comm
        found = clusters.NOTHING
        if dedup.url or dedup.exact or dedup.near:
            numbers, rows = pool.held(comm)
            score = rows["score"].astype(np.int64)
        if dedup.url:
            found = duplicates.find(comm, numbers, rows["url"], None, score, pool.texts, replace(dedup, exact=True, near=False))
        if dedup.exact or dedup.near:
            left = np.isin(numbers, found.drop, invert=True) if len(found.drop) else slice(None)
            known = signatures.load(comm, dedup) if dedup.against else None
            keys, minhash = rows["exact"][left], rows["minhash"][left] if dedup.near else None
            found = clusters.joined(found, duplicates.find(comm, numbers[left], keys, minhash, score[left], pool.texts, dedup, known))
        if dedup.paragraphs:
            pool.find_repeated(comm, found.drop, dedup.paragraph_characters)
        return found

    def _plan(self, pool: Pool, found: Clusters, counts: PartCounts) -> list[ShardPlan]:
        """The shards, the same on all ranks."""
        tallies = pool.tally(self._comm, self._order, found.drop)
        plan = plan_shards(self._order, tallies, self._config.data.shard_megabytes) if tallies else None
        if tallies and not plan:
            came = f"of {counts.documents:,} documents with any text, cleaning and deduplication left none"
            fix = "name other files, another data.text_field, or other clean.steps"
            raise UserError.of("data.input", self._config.data.input, came, fix)
        return self._comm.bcast(plan)


def _name(part: Part) -> str:
    return f"part-{part.number:06d}"


def _look(config: RunConfig) -> tuple[list[Part], list[Bad], dict[str, Any]]:
    """The parts of the input, what is no input after all, and all that determines the shards."""
    data = config.data
    found, bad = sources.find({DEFAULT_CORPUS: data.input, **data.corpora}, data.suffixes, data.exclude)
    against = [artifact.fingerprint(artifact.read(Path(folder), key="dedup.against", stage="shard")) for folder in config.dedup.against]
    fields = ("seed", "part_megabytes", "shard_megabytes", "validation_fraction", "documents_per_member")
    return (
        sources.parts(found, sources.part_bytes(found, data.part_megabytes)),
        bad,
        {
            "data.input": sources.fingerprint(found),
            **{f"data.{name}": value for name, value in vars(ReadOptions.of(data)).items()},
            **{f"data.{name}": getattr(data, name) for name in fields},
            "clean.steps": list(config.clean.steps),
            **{key: value for step in config.clean.steps for key, _, value in knobs.walk(getattr(config.clean, step), f"clean.{step}.")},
            **{key: value for key, _, value in knobs.walk(config.dedup, "dedup.")},
            "dedup.against": against,
        },
    )


def _check_quarantine(counts: PartCounts, config: RunConfig) -> None:
    """Refuse to go on when more than a small part could not be read.

    Raises:
        UserError: the share is above the limit; the first few are named.
    """
    bad, limit = len(counts.bad), config.data.quarantine_limit
    total = bad + counts.documents + counts.empty
    if bad > limit * total:
        first = "; ".join(" ".join(filter(None, entry)) for entry in sorted(counts.bad)[:5])
        rule = f"{bad:,} of {total:,} documents could not be read: {first}" + ("; ..." if bad > 5 else "")
        fix = "mend or leave out the files (data.exclude), or raise the limit; what was read is kept"
        raise UserError.of("data.quarantine_limit", limit, rule, fix)


def _summary(totals: dict[str, Any]) -> str:
    """The totals for people."""
    return "; ".join(_summary_parts(totals))


def _summary_parts(totals: dict[str, Any]) -> Iterator[str]:
    for split in ("train", "validation"):
        count = totals[split]
        yield f"{split} {count['documents']:,} documents, {count['bytes'] / 1e6:,.1f} MB, {count['shards']} shards"
    for what, words in (("empty", "empty documents left out"), ("bad", "not readable"), ("cleaned", "left out by cleaning")):
        if totals[f"{what}_documents"]:
            yield f"{totals[f'{what}_documents']:,} {words}"
    if totals["exact_duplicates"] or totals["near_duplicates"]:
        yield f"{totals['exact_duplicates']:,} exact and {totals['near_duplicates']:,} near duplicates left out"
