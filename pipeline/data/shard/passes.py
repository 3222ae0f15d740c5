"""One run of stage=shard in three passes; each pass resumes the work of an interrupted run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common.errors import UserError
from pipeline.common.locks import claimed
from pipeline.common.mpi import Comm
from pipeline.common.progress import SharedProgress
from pipeline.common.unfinished import Unfinished
from pipeline.config.data import DataConfig, DedupConfig
from pipeline.data.clean.cleaner import Cleaner
from pipeline.data.dedup import clusters, duplicates, paragraphs, signatures
from pipeline.data.dedup.clusters import Clusters
from pipeline.data.read import input_files
from pipeline.data.read.documents import ReadOptions, add_counts, add_in_group
from pipeline.data.read.input_files import InputPart, Listing
from pipeline.data.shard import dropped, limits, shard_report, shards, span_search, spill
from pipeline.data.shard.process_part import PartCounts, listed, process
from pipeline.data.shard.shuffle import Order, ShardPlan, plan_shards
from pipeline.data.shard.spilled_documents import SpillPool, contained
from pipeline.data.shard.sweep import Sweep

log = logging.getLogger("pipeline")

INTERMEDIATE = (spill.SUFFIX, dropped.SUFFIX, paragraphs.FLAGS, dropped.BY_CLEANING, dropped.BY_DEDUPLICATION, *span_search.SUFFIXES)
"""Suffixes of the files of a part, besides its completion record."""


class ShardPasses:
    """The passes of one run: read, clean and spill every part; deduplicate all parts together; write the shards."""

    def __init__(
        self, data: DataConfig, dedup: DedupConfig, comm: Comm, parts: list[InputPart], unfinished: Unfinished, local_size: int
    ) -> None:
        self._local_size = local_size
        self._data, self._dedup, self._comm, self._parts, self._unfinished = data, dedup, comm, parts, unfinished
        files = list(dict.fromkeys(span.file for part in parts for span in part.spans))
        self._files = files
        size = sum(file.size * file.expansion for file in files)
        self._input_bytes = sum(file.size for file in files)
        self._order = Order.plan([file.corpus for file in files], size, data.shard_megabytes, data.seed, data.validation_fraction)

    def check_limits(self, documents: int | None = None) -> None:
        """Refuse a run that needs more files or memory than there are. Collective.

        Raises:
            UserError: on rank 0; nothing of a new run remains.
        """
        if self._comm.rank == 0:
            ranks, bins = (self._comm.size, self._local_size), self._order.groups * self._order.bins
            try:
                limits.check(self._unfinished.output, self._parts, bins, ranks, self._data, self._dedup, documents)
            except UserError:
                if not any(self._unfinished.folder.glob("part-*")):
                    self._unfinished.clear()
                raise
        self._comm.barrier()

    def _stem(self, part: int) -> Path:
        return self._unfinished.folder / _name(part)

    def read(self, cleaner: Cleaner, index: int, size: int) -> None:
        """Pass 1: process this rank's parts, except those that an earlier run has finished."""
        mine = [part for part in input_files.assigned(self._parts, index, size) if self._unfinished.note(_name(part.number)) is None]
        options, dedup = ReadOptions.of(self._data), self._dedup
        total = sum(self._comm.allgather(sum(part.size for part in mine)))
        with SharedProgress(self._comm, total, "shard: reading", "B") as progress:
            for part in mine:
                save_dropped = self._data.save_dropped
                stem = self._stem(part.number)
                counts = process(part, stem, options, cleaner, self._order, dedup, progress.advance, save_dropped=save_dropped)
                self._unfinished.write(_name(part.number), counts.to_json())
        self._comm.barrier()

    def all_read(self) -> bool:
        """Whether every part is spilled, by any rank or task."""
        return all(self._unfinished.note(_name(part.number)) is not None for part in self._parts)

    def write(self, listing: Listing) -> dict[str, Any]:
        """Passes 2 and 3: duplicates, then shards, report and manifest.

        Args:
            listing: with the files and folders that cannot be read, or are not.

        Returns:
            The totals of the manifest on rank 0; an empty dict on the other ranks.

        Raises:
            UserError: too many documents could not be read, or no document remains.
        """
        comm, unfinished = self._comm, self._unfinished
        counts = PartCounts(bad=[listed(entry) for entry in listing.bad])
        for corpus, reasons in listing.skipped.items():
            for reason, (number, size) in reasons.items():
                add_in_group(counts.skipped, corpus, f"file {reason}", number, size)
        runs, index = self._sum(counts)
        if comm.rank == 0:
            input_bytes = self._input_bytes + sum(entry.lost_bytes for entry in listing.bad)
            _check_quarantine(counts, input_bytes, self._data.quarantine_limit, unfinished.folder)
        self.check_limits(counts.documents)
        pool = SpillPool(comm, self._stem, runs, index, self._dedup)
        try:
            return self._write(pool, counts)
        finally:
            pool.close()

    def _sum(self, counts: PartCounts) -> tuple[list[list[int]], list[int]]:
        """Add the counts of all parts to those of rank 0; returns the bounds of the runs, and the index, of every part.

        Every rank reads the records of consecutive parts, so that the sum has their order.
        """
        comm, runs, index, mine = self._comm, [], [], PartCounts()
        bounds = np.arange(comm.size + 1) * len(self._parts) // comm.size
        for part in range(bounds[comm.rank], bounds[comm.rank + 1]):
            of_part = PartCounts.from_json(self._unfinished.note(_name(part)))
            mine.add(of_part)
            runs.append(of_part.runs)
            index.append(of_part.index)
        for added in comm.gather(mine) or ():
            counts.add(added)
        everyone = comm.allgather((runs, index))
        return [bounds for of_rank, _ in everyone for bounds in of_rank], [offset for _, of_rank in everyone for offset in of_rank]

    def _write(self, pool: SpillPool, counts: PartCounts) -> dict[str, Any]:
        """Passes 2 and 3 on the pool of all parts; see write."""
        comm, unfinished = self._comm, self._unfinished
        duplicated, plan = self._planned(pool, counts)
        if self._data.save_dropped:
            dropped.write_duplicates(comm, pool, duplicated)
        mine = range(comm.rank, len(plan), comm.size)
        not_written = [number for number in mine if unfinished.note(plan[number].name) is None]
        missing = sorted(number for numbers in comm.allgather(not_written) for number in numbers)
        sweep = Sweep(comm, pool, duplicated.drop, self._dedup)
        for start in range(0, len(missing), comm.size):
            shards_of_round = [plan[number] for number in missing[start : start + comm.size]]
            documents = sweep.documents(shards_of_round)
            if comm.rank < len(shards_of_round):
                shard = shards_of_round[comm.rank]
                note = shards.write(unfinished.output, shard, documents, self._data, self._dedup, unfinished.folder)
                unfinished.write(shard.name, note)
            else:
                deque(documents, maxlen=0)  # this rank sends its documents to the others
        comm.barrier()
        written = shards.WrittenShard.gathered(comm, [unfinished.note(plan[number].name) for number in mine])
        self._count_duplicates(pool, duplicated, counts)
        excerpts = shard_report.excerpts_of(comm, pool, duplicated)
        totals: dict[str, Any] = {}
        if comm.rank == 0:
            if self._data.save_dropped:
                parts = map(self._stem, range(len(self._parts)))
                files = [stem.with_suffix(suffix) for stem in parts for suffix in (dropped.BY_CLEANING, dropped.BY_DEDUPLICATION)]
                files += [unfinished.folder / f"{shard.name}{dropped.BY_PARAGRAPHS}" for shard in plan]
                dropped.join(unfinished.output / dropped.NAME, files)
            totals = shards.publish(
                unfinished.output, unfinished.settings, written, counts, duplicated, excerpts, self._files, self._data.compare
            )
        comm.barrier()  # the manifest is written: the folder is complete
        for part in pool.mine:
            unfinished.remove(_name(part), INTERMEDIATE)
        for number in mine:
            unfinished.remove(plan[number].name, [dropped.BY_PARAGRAPHS])
        comm.barrier()
        if comm.rank == 0:
            unfinished.clear()
        return totals

    def _count_duplicates(self, pool: SpillPool, duplicated: Clusters, counts: PartCounts) -> None:
        """Add the duplicates to the dropped documents of every corpus. Collective; the counts are those of rank 0."""
        groups, sizes = pool.groups_and_sizes(duplicated.drop)
        table = np.zeros((len(self._order.corpora), len(clusters.ClusterKind), 2), dtype=np.int64)
        np.add.at(table, (groups // 2, duplicated.origin["kind"]), np.stack([np.ones_like(sizes), sizes], axis=1))
        gathered = self._comm.gather(table)
        if gathered is not None:
            for corpus, of_corpus in zip(self._order.corpora, sum(gathered).tolist(), strict=True):
                for kind, (documents, size) in zip(clusters.ClusterKind, of_corpus, strict=True):
                    if documents:
                        add_in_group(counts.lost, corpus, f"dedup: {kind.reason}", documents, size)

    def _planned(self, pool: SpillPool, counts: PartCounts) -> tuple[Clusters, list[ShardPlan]]:
        """Return the duplicates and the shard plan, loaded from an interrupted run if it completed this step.

        The drops are saved by part, and a rank loads those of its parts.
        """
        saved = self._comm.bcast(self._unfinished.note("plan") if self._comm.rank == 0 else None)
        if saved:
            drop, origin = dropped.load(pool)
            return clusters.from_json(saved["found"], drop, origin), [ShardPlan(**shard) for shard in saved["shards"]]
        duplicated = self._duplicates(pool)
        plan = self._plan(pool, duplicated, counts)
        dropped.save(pool, duplicated)
        self._comm.barrier()
        if self._comm.rank == 0:
            self._unfinished.write("plan", {"found": clusters.to_json(duplicated), "shards": [asdict(shard) for shard in plan]})
        return duplicated, plan

    def _duplicates(self, pool: SpillPool) -> Clusters:
        """Find duplicates by URL, by text, and near duplicates; then repeated paragraphs, and repeated spans of what they leave."""
        dedup, comm = self._dedup, self._comm
        duplicated = clusters.NOTHING
        if dedup.url:
            documents = pool.documents(url=True)
            duplicated = duplicates.find(comm, documents, replace(dedup, exact=True, near=False))
            duplicated.origin["kind"] = clusters.ClusterKind.URL
        if dedup.exact or dedup.near:
            chosen = ~contained(documents.numbers, duplicated.drop) if dedup.url else None
            known = signatures.load(comm, dedup) if dedup.against else None
            by_text = duplicates.find(comm, pool.documents(url=False, chosen=chosen), dedup, known)
            duplicated = clusters.joined(duplicated, by_text)
        if dedup.paragraphs:
            pool.find_repeated(duplicated.drop, dedup.paragraph_characters)
        if dedup.spans:
            sources = [*span_search.parts(pool, duplicated.drop, dedup), *span_search.others(comm, dedup, self._unfinished.folder)]
            found = span_search.find(comm, sources, dedup.spans, 1e6 * dedup.span_megabytes, pool.descriptor)
            duplicated = replace(duplicated, spans=found)
        return duplicated

    def _plan(self, pool: SpillPool, duplicated: Clusters, counts: PartCounts) -> list[ShardPlan]:
        """The shard plan, identical on all ranks."""
        tallies = pool.tally(self._order, duplicated.drop)
        plan = plan_shards(self._order, tallies, self._data.shard_megabytes) if tallies else None
        if tallies and not plan:
            lost: dict[str, list[int]] = {}
            for reasons in counts.lost.values():
                add_counts(lost, reasons)
            first = max(((number, reason) for reason, (number, _) in lost.items()), default=None)
            mostly = f", most of them by {first[1]} ({first[0]:,})" if first else ""
            rule = f"cleaning and deduplication dropped all {counts.documents:,} non-empty documents{mostly}"
            fix = "specify other files, another data.text_field, or other clean.steps"
            if not counts.documents and self._data.sample < 1:
                fix = f"data.sample={self._data.sample} chose no document: increase it"
            self._unfinished.clear()  # nothing of this run can be continued
            raise UserError.of("data.input", self._data.input, rule, fix)
        return self._comm.bcast(plan)


@contextmanager
def claim_final_passes(passes: ShardPasses, unfinished: Unfinished, comm: Comm) -> Iterator[bool]:
    """Yield whether this task of a job array runs the remaining passes: all parts are read and no other task has claimed them."""
    with ExitStack() as claim:
        ours = comm.rank == 0 and passes.all_read()
        if ours:
            try:
                claim.enter_context(claimed(unfinished.folder, "data.shards"))
                ours = passes.all_read()  # False if another task has completed the stage since and removed its progress records
            except UserError as error:  # another task holds the claim, or the folder is not writable
                log.info("shard: this task does not complete the stage: %s", error)
                ours = False
        yield comm.bcast(ours)


def _name(part: int) -> str:
    return f"part-{part:06d}"


def _check_quarantine(counts: PartCounts, input_bytes: int, limit: float, records: Path) -> None:
    """Check the share of the input that could not be read: single documents by their number, damaged files by the bytes that are lost.

    Args:
        input_bytes: stored bytes of all input files.

    Raises:
        UserError: the share exceeds the limit; the message names the first five.
    """
    lost = sum(lost_bytes for *_, lost_bytes in counts.bad)
    bad = sum(not lost_bytes for *_, lost_bytes in counts.bad)
    total = bad + counts.documents + counts.empty
    if bad / max(1, total) + lost / max(1, input_bytes) > limit:
        shares = [f"{bad:,} of {total:,} documents"] if bad else []
        shares += [f"about {lost:,} of {input_bytes:,} bytes, in damaged files,"] if lost else []
        first = "; ".join(" ".join(filter(None, entry[:3])) for entry in sorted(counts.bad)[:5])
        rule = f"{' and '.join(shares)} could not be read: {first}" + ("; ..." if len(counts.bad) > 5 else "")
        fix = f"raise the limit, which keeps the finished parts; or repair or exclude the files (data.exclude), and remove {records} before"
        raise UserError.of("data.quarantine_limit", limit, rule, fix)
