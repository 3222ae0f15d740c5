"""One run of stage=shard in three passes; each pass resumes the work of an interrupted run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.common.locks import claimed
from pipeline.common.mpi import Comm
from pipeline.common.shared_progress import SharedProgress
from pipeline.common.unfinished import Unfinished
from pipeline.config.data import DataConfig, DedupConfig
from pipeline.data.clean.cleaner import Cleaner
from pipeline.data.dedup import clusters, duplicates, signatures
from pipeline.data.dedup.clusters import Clusters
from pipeline.data.read import input_files
from pipeline.data.read.documents import ReadOptions
from pipeline.data.read.input_files import InputPart, Listing
from pipeline.data.shard import dropped, shards
from pipeline.data.shard.process_part import PartCounts, listed, process
from pipeline.data.shard.shuffle import Order, ShardPlan, plan_shards
from pipeline.data.shard.spilled_documents import Pool

log = logging.getLogger("pipeline")


class ShardPasses:
    """The passes of one run: read, clean and spill every part; deduplicate all parts together; write the shards."""

    def __init__(self, data: DataConfig, dedup: DedupConfig, comm: Comm, parts: list[InputPart], unfinished: Unfinished) -> None:
        self._data, self._dedup, self._comm, self._parts, self._unfinished = data, dedup, comm, parts, unfinished
        files = list(dict.fromkeys(span.file for part in parts for span in part.spans))
        self._files = files
        size = sum(file.size * file.expansion for file in files)
        self._input_bytes = sum(file.size for file in files)
        self._order = Order.plan([file.corpus for file in files], size, data.shard_megabytes, data.seed, data.validation_fraction)

    def _stem(self, part: InputPart) -> Path:
        return self._unfinished.folder / _name(part)

    def read(self, cleaner: Cleaner, index: int, size: int) -> None:
        """Pass 1: process this rank's parts, except those that an earlier run has finished."""
        mine = [part for part in input_files.assigned(self._parts, index, size) if self._unfinished.note(_name(part)) is None]
        options, dedup = ReadOptions.of(self._data), self._dedup
        total = sum(self._comm.allgather(sum(part.size for part in mine)))
        with SharedProgress(self._comm, total, "shard: reading", "B") as progress:
            for part in mine:
                save_dropped = self._data.save_dropped
                stem = self._stem(part)
                counts = process(part, stem, options, cleaner, self._order, dedup, progress.advance, save_dropped=save_dropped)
                self._unfinished.write(_name(part), counts.to_json())
        self._comm.barrier()

    def all_read(self) -> bool:
        """Whether every part is spilled, by any rank or task."""
        return all(self._unfinished.note(_name(part)) is not None for part in self._parts)

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
                counts.count_skipped(corpus, f"file {reason}", number, size)
        runs = []
        for part in self._parts if comm.rank == 0 else ():
            part_counts = PartCounts.from_json(unfinished.note(_name(part)))
            counts.add(part_counts)
            runs.append(part_counts.runs)
        if comm.rank == 0:
            input_bytes = self._input_bytes + sum(entry.lost_bytes for entry in listing.bad)
            _check_quarantine(counts, input_bytes, self._data.quarantine_limit, unfinished.folder)
        pool = Pool([self._stem(part) for part in self._parts], comm.bcast(runs))
        duplicated, plan = self._planned(pool, counts)
        if self._data.save_dropped:
            dropped.write_duplicates(comm, pool, duplicated)
        for shard in plan[comm.rank :: comm.size]:
            if unfinished.note(shard.name) is None:
                unfinished.write(
                    shard.name, shards.write(unfinished.output, shard, pool, duplicated.drop, self._data, self._dedup, unfinished.folder)
                )
        comm.barrier()
        if comm.rank > 0:
            return {}
        written = {shard.name: unfinished.note(shard.name) for shard in plan}
        if self._data.save_dropped:
            files = [stem.with_suffix(suffix) for stem in pool.stems for suffix in (dropped.BY_CLEANING, dropped.BY_DEDUPLICATION)]
            files += [unfinished.folder / f"{shard.name}{dropped.BY_PARAGRAPHS}" for shard in plan]
            dropped.join(unfinished.output / dropped.NAME, files)
        self._count_duplicates(pool, duplicated, counts)
        totals = shards.publish(unfinished.output, unfinished.settings, written, counts, duplicated, pool, self._files)
        unfinished.clear()
        return totals

    def _count_duplicates(self, pool: Pool, found: Clusters, counts: PartCounts) -> None:
        """Add the duplicates to the dropped documents of every corpus. Only on rank 0."""
        groups, sizes = pool.groups_and_sizes(found.drop)
        for number, corpus in enumerate(self._order.corpora):
            for kind in clusters.Kind:
                mine = (groups // 2 == number) & (found.origin["kind"] == kind)
                if mine.any():
                    counts.count_lost(corpus, f"dedup: {kind.reason}", int(mine.sum()), int(sizes[mine].sum()))

    def _planned(self, pool: Pool, counts: PartCounts) -> tuple[Clusters, list[ShardPlan]]:
        """Return the duplicates and the shard plan, loaded from an interrupted run if it completed this step."""
        saved = self._comm.bcast(self._unfinished.note("plan") if self._comm.rank == 0 else None)
        arrays = {name: self._unfinished.folder / f"{name}.npy" for name in ("drop", "origin")}
        if saved:
            origin = np.load(arrays["origin"]) if self._comm.rank == 0 else np.empty(0, clusters.ORIGIN)
            return clusters.from_json(saved["found"], np.load(arrays["drop"]), origin), [ShardPlan(**shard) for shard in saved["shards"]]
        duplicated = self._duplicates(pool)
        plan = self._plan(pool, duplicated, counts)
        if self._comm.rank == 0:
            for name, path in arrays.items():
                with atomic_file(path) as handle:
                    np.save(handle, getattr(duplicated, name))
            self._unfinished.write("plan", {"found": clusters.to_json(duplicated), "shards": [vars(shard) for shard in plan]})
        return duplicated, plan

    def _duplicates(self, pool: Pool) -> Clusters:
        """Find duplicates by URL, by text, and near duplicates; then repeated paragraphs."""
        dedup, comm = self._dedup, self._comm
        duplicated = clusters.NOTHING
        if dedup.url or dedup.exact or dedup.near:
            numbers, rows = pool.local_rows(comm)
            score = rows["score"].astype(np.int64)
        if dedup.url:
            duplicated = duplicates.find(comm, numbers, rows["url"], None, score, pool.texts, replace(dedup, exact=True, near=False))
            duplicated.origin["kind"] = clusters.Kind.URL
        if dedup.exact or dedup.near:
            remaining = np.isin(numbers, duplicated.drop, invert=True) if len(duplicated.drop) else slice(None)
            known = signatures.load(comm, dedup) if dedup.against else None
            keys, minhash = rows["exact"][remaining], rows["minhash"][remaining] if dedup.near else None
            duplicated = clusters.joined(
                duplicated, duplicates.find(comm, numbers[remaining], keys, minhash, score[remaining], pool.texts, dedup, known)
            )
        if dedup.paragraphs:
            pool.find_repeated(comm, duplicated.drop, dedup.paragraph_characters)
        return duplicated

    def _plan(self, pool: Pool, found: Clusters, counts: PartCounts) -> list[ShardPlan]:
        """The shard plan, identical on all ranks."""
        tallies = pool.tally(self._comm, self._order, found.drop)
        plan = plan_shards(self._order, tallies, self._data.shard_megabytes) if tallies else None
        if tallies and not plan:
            rule = f"cleaning and deduplication dropped all {counts.documents:,} non-empty documents"
            fix = "specify other files, another data.text_field, or other clean.steps"
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


def _name(part: InputPart) -> str:
    return f"part-{part.number:06d}"


def _check_quarantine(counts: PartCounts, input_bytes: int, limit: float, records: Path) -> None:
    """Check the share of the input that could not be read: single documents by their number, damaged files by the bytes that are lost.

    Args:
        input_bytes: stored bytes of all input files.
        records: folder of the completion records.

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
