"""One run of stage=shard in three passes, in parts that are kept: an interrupted run goes on with those that are missing.

The parts are those of the input, the searches for duplicates, and the shards. The tasks of a job array share the first and the last; the
task that reads the last part searches for duplicates.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import locks
from pipeline.common.errors import UserError
from pipeline.common.mpi import Comm
from pipeline.common.progress import SharedProgress
from pipeline.common.ranks import ArrayTask
from pipeline.common.unfinished import Unfinished
from pipeline.config.data import DataConfig, DedupConfig
from pipeline.data.clean.cleaner import Cleaner
from pipeline.data.dedup import paragraphs
from pipeline.data.dedup.clusters import Clusters
from pipeline.data.read import input_files
from pipeline.data.read.documents import ReadOptions, add_counts, add_in_group
from pipeline.data.read.input_files import InputPart, Listing
from pipeline.data.shard import dropped, limits, searches, shard_report, shards, span_search, spill
from pipeline.data.shard.process_part import PartCounts, listed, process
from pipeline.data.shard.shuffle import Order, ShardPlan, plan_shards
from pipeline.data.shard.spilled_documents import SpillPool
from pipeline.data.shard.sweep import Sweep

log = logging.getLogger("pipeline")

PLAN = "plan"
"""Name of the completion record of pass 2, with the plan of the shards."""

INTERMEDIATE = (spill.SUFFIX, *searches.DROPS, paragraphs.FLAGS, dropped.BY_CLEANING, dropped.BY_DEDUPLICATION, *span_search.SUFFIXES)
"""Suffixes of the files of a part, besides its completion record."""


class ShardPasses:
    """The passes of one run: read, clean and spill every part; deduplicate all parts together; write the shards.

    Args:
        listing: with the files and folders that cannot be read, or are not.
        array: the task of a job array that this process is.
    """

    def __init__(
        self,
        data: DataConfig,
        dedup: DedupConfig,
        comm: Comm,
        listing: Listing,
        parts: list[InputPart],
        unfinished: Unfinished,
        local_size: int,
        array: ArrayTask | None,
    ) -> None:
        self._local_size, self._listing, self._array = local_size, listing, array
        self._data, self._dedup, self._comm, self._parts, self._unfinished = data, dedup, comm, parts, unfinished
        self._records = searches.Records(comm, unfinished)
        self._pool: SpillPool | None = None
        self._counts = PartCounts()
        self._made: tuple[SpillPool, Clusters, list[ShardPlan]] | None = None
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

    def read(self, cleaner: Cleaner) -> None:
        """Pass 1: process this rank's parts, except those that an earlier run has finished."""
        tasks, comm = self._array or ArrayTask("", 0, 1), self._comm
        assigned = input_files.assigned(self._parts, tasks.index * comm.size + comm.rank, tasks.size * comm.size)
        mine = [part for part in assigned if not self._unfinished.finished(_name(part.number))]
        options, dedup = ReadOptions.of(self._data), self._dedup
        total = sum(self._comm.allgather(sum(part.size for part in mine)))
        with SharedProgress(self._comm, total, "shard: reading", "B") as progress:
            for part in mine:
                save_dropped = self._data.save_dropped
                stem = self._stem(part.number)
                counts = process(part, stem, options, cleaner, self._order, dedup, progress.advance, save_dropped=save_dropped)
                self._unfinished.write(_name(part.number), counts.to_json())
        self._comm.barrier()

    def write(self, *, shards: bool = True) -> None:
        """Pass 2, and pass 3 up to the manifest: duplicates, then the shards, except those that are written. Collective.

        A task of a job array does what no other task does: it returns if parts are not read, or while another task searches for duplicates.

        Args:
            shards: write them, too.

        Raises:
            UserError: too many documents could not be read, or no document remains.
        """
        comm, unfinished = self._comm, self._unfinished
        if self._array and not comm.bcast(comm.rank == 0 and all(unfinished.finished(_name(part.number)) for part in self._parts)):
            log.info("shard: this task has read its parts; the last task of the job array to do so searches for duplicates")
            return
        with claim(comm, unfinished.folder, f"{PLAN}.lock") if self._array else nullcontext(True) as alone:
            if not alone and not self._records.finished(PLAN):
                log.info("shard: this task has read its parts; another one searches for duplicates")
                return
            pool, duplicated, plan = self._planned()
        if shards:
            self._write_shards(Sweep(comm, pool, duplicated.drop, self._dedup), plan)

    def complete(self) -> dict[str, Any]:
        """End pass 3: write report and manifest, and remove the completion records. Collective; no other task may be at work.

        Returns:
            The totals of the manifest on rank 0; an empty dict on the other ranks, and if shards are missing or all is done.
        """
        if not self._records.finished(PLAN):
            return {}
        pool, duplicated, plan = self._planned()
        return {} if self._missing(plan) else self._publish(pool, duplicated, plan)

    def close(self) -> None:
        """Close the files."""
        if self._pool:
            self._pool.close()

    def _open(self) -> SpillPool:
        """The spills of all parts, whose counts are summed. Collective."""
        listing, comm = self._listing, self._comm
        counts = self._counts = PartCounts(bad=[listed(entry) for entry in listing.bad])
        for corpus, reasons in listing.skipped.items():
            for reason, (number, size) in reasons.items():
                add_in_group(counts.skipped, corpus, f"file {reason}", number, size)
        runs, index = self._sum(counts)
        if comm.rank == 0:
            input_bytes = self._input_bytes + sum(entry.lost_bytes for entry in listing.bad)
            _check_quarantine(counts, input_bytes, self._data.quarantine_limit, self._unfinished.folder)
        self.check_limits(counts.documents)
        self._pool = SpillPool(comm, self._stem, runs, index, self._dedup)
        return self._pool

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

    def _missing(self, plan: list[ShardPlan]) -> list[ShardPlan]:
        """The shards that are not written. Collective."""
        comm = self._comm
        missing = [number for number in range(comm.rank, len(plan), comm.size) if not self._unfinished.finished(plan[number].name)]
        return [plan[number] for number in sorted(number for numbers in comm.allgather(missing) for number in numbers)]

    def _write_shards(self, sweep: Sweep, plan: list[ShardPlan]) -> None:
        """Write the missing shards, one a rank at a time; a task of a job array begins with its share, and leaves out those of others."""
        comm, unfinished, array = self._comm, self._unfinished, self._array
        missing, written = self._missing(plan), 0
        first = len(missing) * array.index // array.size if array else 0
        left = deque(missing[first:] + missing[:first])
        while left:
            with ExitStack() as claims:
                of_round: list[ShardPlan] = []
                while left and len(of_round) < comm.size:
                    shard = left.popleft()
                    ours = not array or claims.enter_context(claim(comm, unfinished.folder, f"{shard.name}.lock"))
                    if ours and not (array and self._records.finished(shard.name)):
                        of_round.append(shard)
                documents = sweep.documents(of_round) if of_round else iter(())
                if comm.rank < len(of_round):
                    shard = of_round[comm.rank]
                    note = shards.write(unfinished.output, shard, documents, self._data, self._dedup, unfinished.folder)
                    unfinished.write(shard.name, note)
                else:
                    deque(documents, maxlen=0)  # this rank sends its documents to the others
                written += len(of_round)
                comm.barrier()
        log.info("shard: wrote %d of %d shards; %d were written before", written, len(plan), len(plan) - len(missing))

    def _publish(self, pool: SpillPool, duplicated: Clusters, plan: list[ShardPlan]) -> dict[str, Any]:
        """Write report and manifest of the shards, which are written, and remove the completion records; see complete."""
        comm, unfinished, counts = self._comm, self._unfinished, self._counts
        mine = range(comm.rank, len(plan), comm.size)
        written = shards.WrittenShard.gathered(comm, [unfinished.note(plan[number].name) for number in mine])
        searches.count(comm, pool, duplicated, self._order.corpora, counts)
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

    def _planned(self) -> tuple[SpillPool, Clusters, list[ShardPlan]]:
        """Return the spills, their duplicates and the shard plan, as far as possible from an interrupted run. Collective."""
        if self._made:
            return self._made
        pool = self._open()
        duplicated = searches.find(self._records, pool, self._dedup)
        saved = self._records.note(PLAN)
        if saved is None:
            plan = self._plan(pool, duplicated)
            if self._data.save_dropped:
                dropped.write_duplicates(self._comm, pool, duplicated)
            saved = {"shards": [asdict(shard) for shard in plan]}
            self._records.keep(PLAN, saved)
        self._made = pool, duplicated, [ShardPlan(**shard) for shard in saved["shards"]]
        return self._made

    def _plan(self, pool: SpillPool, duplicated: Clusters) -> list[ShardPlan]:
        """The shard plan, identical on all ranks."""
        counts = self._counts
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
def claim(comm: Comm, folder: Path, file: str = locks.FILE) -> Iterator[bool]:
    """Yield whether this task of a job array holds a lock, alone; no other task gets it while the block runs. Collective."""
    with ExitStack() as held:
        ours = comm.rank == 0
        try:
            if ours:
                held.enter_context(locks.claimed(folder, "data.shards", minutes=0, file=file))
        except locks.InUseError:
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
