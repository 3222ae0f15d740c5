"""Pass 2 of stage=shard: the searches for duplicates among all parts. An interrupted run goes on after the last one that is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.common.mpi import Comm
from pipeline.common.unfinished import Unfinished
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import clusters, duplicates, signatures
from pipeline.data.dedup.clusters import Clusters
from pipeline.data.read.documents import add_in_group
from pipeline.data.shard import dropped, span_search
from pipeline.data.shard.process_part import PartCounts
from pipeline.data.shard.spilled_documents import SpillPool, contained

URL, TEXT, PARAGRAPHS, SPANS = "url", "text", "paragraphs", "spans"
"""Names of the completion records of the searches."""

DROPS = tuple(f".{search}{dropped.SUFFIX}" for search in (URL, TEXT))
"""Suffixes of the files of a part with the documents that a search drops."""


@dataclass(frozen=True)
class Records:
    """Completion records of steps of all ranks. All calls are collective."""

    comm: Comm
    unfinished: Unfinished

    def finished(self, name: str) -> bool:
        """Whether there is a record of a step, or of a part or shard."""
        return self.comm.bcast(self.comm.rank == 0 and self.unfinished.finished(name))

    def note(self, name: str) -> Any:
        """The record of a step, None without one."""
        return self.comm.bcast(self.unfinished.note(name) if self.comm.rank == 0 else None)

    def keep(self, name: str, note: Any) -> None:
        """Write the record of a step."""
        self.comm.barrier()
        if self.comm.rank == 0:
            self.unfinished.write(name, note)


def find(records: Records, pool: SpillPool, dedup: DedupConfig) -> Clusters:
    """Find duplicates by URL, by text, and near duplicates; then repeated paragraphs, and repeated spans of what they leave. Collective."""
    comm, duplicated = records.comm, clusters.NOTHING

    def by_url() -> Clusters:
        found = duplicates.find(comm, pool.documents(url=True), replace(dedup, exact=True, near=False))
        found.origin["kind"] = clusters.ClusterKind.URL
        return found

    def by_text() -> Clusters:
        chosen = ~contained(pool.numbers(), duplicated.drop) if dedup.url else None
        known = signatures.load(comm, dedup) if dedup.against else None
        return duplicates.find(comm, pool.documents(url=False, chosen=chosen), dedup, known)

    if dedup.url:
        duplicated = _found(records, URL, pool, by_url)
    if dedup.exact or dedup.near:
        duplicated = clusters.joined(duplicated, _found(records, TEXT, pool, by_text))
    if dedup.paragraphs and not records.finished(PARAGRAPHS):
        pool.find_repeated(duplicated.drop, dedup.paragraph_characters)
        records.keep(PARAGRAPHS, True)
    if dedup.spans:
        found = records.note(SPANS)
        if found is None:
            sources = [*span_search.parts(pool, duplicated.drop, dedup), *span_search.others(comm, dedup, records.unfinished.folder)]
            found = span_search.find(comm, sources, dedup.spans, 1e6 * dedup.span_megabytes, pool.descriptor)
            records.keep(SPANS, found)
        duplicated = replace(duplicated, spans=found)
    return duplicated


def _found(records: Records, name: str, pool: SpillPool, search: Callable[[], Clusters]) -> Clusters:
    """The result of a search, as an interrupted run left it. Drops are saved by part, and a rank loads those of its parts."""
    saved, suffix = records.note(name), f".{name}{dropped.SUFFIX}"
    if saved is not None:
        return clusters.from_json(saved, *dropped.load(pool, suffix))
    found = search()
    dropped.save(pool, suffix, found)
    records.keep(name, clusters.to_json(found))
    return found


def count(comm: Comm, pool: SpillPool, duplicated: Clusters, corpora: Sequence[str], counts: PartCounts) -> None:
    """Add the duplicates to the dropped documents of every corpus. Collective; the counts are those of rank 0."""
    groups, sizes = pool.groups_and_sizes(duplicated.drop)
    table = np.zeros((len(corpora), len(clusters.ClusterKind), 2), dtype=np.int64)
    np.add.at(table, (groups // 2, duplicated.origin["kind"]), np.stack([np.ones_like(sizes), sizes], axis=1))
    gathered = comm.gather(table)
    if gathered is not None:
        for corpus, of_corpus in zip(corpora, sum(gathered).tolist(), strict=True):
            for kind, (documents, size) in zip(clusters.ClusterKind, of_corpus, strict=True):
                if documents:
                    add_in_group(counts.lost, corpus, f"dedup: {kind.reason}", documents, size)
