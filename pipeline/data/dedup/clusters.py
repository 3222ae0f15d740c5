"""Clusters of duplicates: connected components of the edges between documents, and the document that is kept in each cluster."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from pipeline.common.mpi import Comm, exchange
from pipeline.data.dedup import distributed

LISTED = 200
"""Number of clusters in the report: the largest ones."""

LISTED_DOCUMENTS = 50
"""Number of documents per cluster in the report."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of duplicates, for the report.

    Attributes:
        kept: number of the document that is kept; None if it belongs to a corpus in dedup.against.
        dropped: numbers of the dropped documents, among the best LISTED_DOCUMENTS.
        size: total documents, including the kept one and those of dedup.against.
        kind: "exact" if all are copies of one text (or have the same URL), else "near".
        edges: (number, number, Jaccard index) of the first LISTED_DOCUMENTS compared pairs; documents of dedup.against have negative
            numbers and an estimated index.
    """

    kept: int | None
    dropped: list[int]
    size: int
    kind: str
    edges: list[tuple[int, int, float]]


class Kind(IntEnum):
    """Why a document is a duplicate."""

    NEAR = 0
    EXACT = 1
    URL = 2

    @property
    def reason(self) -> str:
        """The reason in words."""
        return ("near duplicate", "exact duplicate", "same URL")[self]


ORIGIN = np.dtype([("kept", "<i8"), ("kind", "u1")])
"""The document that is kept in the cluster of a dropped one, negative if it belongs to a corpus in dedup.against; and the Kind."""


@dataclass(frozen=True)
class Clusters:
    """The duplicates of a corpus. No field depends on the number of ranks, except that each rank has the drops of its documents.

    Attributes:
        drop: (n,) int64 sorted numbers of the documents to drop, of those that this rank holds.
        origin: (n,) ORIGIN of every document in `drop`.
        exact: number of exact duplicates of the corpus.
        near: number of near duplicates.
        clusters: the largest clusters, for the report.
        sizes: cluster size in documents -> number of clusters.
    """

    drop: np.ndarray
    origin: np.ndarray
    exact: int
    near: int
    clusters: list[Cluster]
    sizes: dict[int, int]


NOTHING = Clusters(np.empty(0, np.int64), np.empty(0, ORIGIN), 0, 0, [], {})
"""No duplicates."""

_DROP = np.dtype([("number", "<i8"), ("kept", "<i8"), ("holder", "<i4")])
_VERTEX = np.dtype([("number", "<i8"), ("length", "<i8"), ("holder", "<i4")])
_HEAD = np.dtype([("label", "<i8"), ("best", "<i8"), ("length", "<i8"), ("size", "<i8"), ("near", "?")])
"""A cluster, or the part of it on one rank: its label, best document, that document's length, documents, whether an edge is near."""


def to_json(found: Clusters) -> dict[str, Any]:
    """All fields except `drop` and `origin`, as JSON."""
    plain = dataclasses.asdict(replace(found, drop=found.drop[:0], origin=found.origin[:0]))
    return {**plain, "drop": None, "origin": None, "sizes": list(found.sizes.items())}


def from_json(encoded: dict[str, Any], drop: np.ndarray, origin: np.ndarray) -> Clusters:
    """Restore Clusters from the result of `to_json`, `drop` and `origin`."""
    listed = [Cluster(**cluster) for cluster in encoded["clusters"]]
    return Clusters(**{**encoded, "drop": drop, "origin": origin, "clusters": listed, "sizes": dict(encoded["sizes"])})


def joined(first: Clusters, second: Clusters) -> Clusters:
    """Combine two successive searches, the second one over the documents that the first one kept."""
    sizes = {size: first.sizes.get(size, 0) + second.sizes.get(size, 0) for size in sorted(first.sizes.keys() | second.sizes.keys())}
    listed = sorted([*first.clusters, *second.clusters], key=lambda cluster: -cluster.size)[:LISTED]
    drop, origin = (np.concatenate([getattr(found, name) for found in (first, second)]) for name in ("drop", "origin"))
    order = np.argsort(drop)
    return Clusters(drop[order], origin[order], first.exact + second.exact, first.near + second.near, listed, sizes)


def resolve(comm: Comm, edges: np.ndarray) -> Clusters:
    """Keep the best document of every cluster: the longest one, then the lowest number. Collective.

    Documents of other corpora have negative numbers and are never dropped. Every rank holds its edges and its share of the documents in
    them, which is about 600 bytes per edge while labels are exchanged.

    Args:
        edges: (n,) EDGE of this rank between duplicates, each pair once over all ranks, in any order; `right` of an exact edge is the copy,
            and is the right document of no other exact edge.
    """
    labels, vertices = _labelled(comm, edges)
    edge_labels = distributed.values_of(comm, vertices["number"], labels, edges["left"])
    heads = _heads(comm, labels, vertices, edge_labels, edges)
    drop, origin, near = _drops(comm, edges, vertices, _kept(comm, heads, labels))
    exact, near = (sum(comm.allgather(count)) for count in (int(np.count_nonzero(edges["exact"])), near))
    sizes: dict[int, int] = {}
    for histogram in comm.allgather(dict(zip(*(values.tolist() for values in np.unique(heads["size"], return_counts=True)), strict=True))):
        for size, number in histogram.items():
            sizes[size] = sizes.get(size, 0) + number
    listed = _listed(comm, heads, labels, vertices, edge_labels, edges)
    return Clusters(drop, origin, exact, near, listed, dict(sorted(sizes.items())))


def _labelled(comm: Comm, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The documents in edges that this rank owns: their labels, which are the lowest numbers of their clusters, and (n,) _VERTEX."""
    ends = np.empty(2 * len(edges), dtype=_VERTEX)
    for side, half in (("left", ends[: len(edges)]), ("right", ends[len(edges) :])):
        half["number"], half["length"], half["holder"] = edges[side], edges[f"{side}_length"], edges[f"{side}_holder"]
    ends = ends[np.unique(ends["number"], return_index=True)[1]]
    ends = exchange(comm, ends, ends["number"] % comm.size)
    vertices, labels = distributed.components(comm, edges["left"], edges["right"])
    numbers, places = np.unique(ends["number"], return_index=True)
    assert np.array_equal(numbers, vertices)
    return labels, ends[places]


def _heads(comm: Comm, labels: np.ndarray, vertices: np.ndarray, edge_labels: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The clusters whose label this rank owns, sorted by label: (n,) _HEAD. A rank sends one row for each cluster that it has a part of."""
    parts = np.zeros(len(vertices), dtype=_HEAD)
    parts["label"], parts["best"], parts["length"], parts["size"] = labels, vertices["number"], vertices["length"], 1
    flags = np.zeros(len(near := np.unique(edge_labels[~edges["exact"]])), dtype=_HEAD)
    flags["label"], flags["best"], flags["length"], flags["near"] = near, near, -1, True  # never the best: every length is at least 0
    parts = _merged(np.concatenate([parts, flags]))
    return _merged(exchange(comm, parts, parts["label"] % comm.size))


def _merged(parts: np.ndarray) -> np.ndarray:
    """Merge rows of the same cluster."""
    parts = parts[np.lexsort((parts["best"], -parts["length"], parts["label"]))]
    starts = np.flatnonzero(np.diff(parts["label"], prepend=parts["label"][:1] - 1))
    merged = parts[starts]
    if len(merged):
        merged["size"] = np.add.reduceat(parts["size"], starts)
        merged["near"] = np.logical_or.reduceat(parts["near"], starts)
    return merged


def _kept(comm: Comm, heads: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The best document of the cluster of every label."""
    return distributed.values_of(comm, heads["label"], heads["best"], labels)


def _drops(comm: Comm, edges: np.ndarray, vertices: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Send the numbers of dropped documents to the ranks that hold them.

    Returns:
        drop, origin: see Clusters.
        near: number of near duplicates among them.
    """
    dropped = np.flatnonzero((vertices["number"] != kept) & (vertices["number"] >= 0))
    rows = np.empty(len(dropped), dtype=_DROP)
    rows["number"], rows["kept"], rows["holder"] = vertices["number"][dropped], kept[dropped], vertices["holder"][dropped]
    rows = exchange(comm, rows, rows["holder"])
    rows = rows[np.argsort(rows["number"])]
    origin = np.zeros(len(rows), dtype=ORIGIN)
    origin["kept"] = rows["kept"]
    copies = edges[edges["exact"]][["left", "right", "right_holder"]].copy()
    copies = exchange(comm, copies, copies["right_holder"])  # of a document that may itself be a near duplicate of the best one
    places = np.searchsorted(rows["number"], copies["right"])
    origin["kept"][places], origin["kind"][places] = copies["left"], Kind.EXACT
    return rows["number"].copy(), origin, len(rows) - len(copies)


def _listed(
    comm: Comm, heads: np.ndarray, labels: np.ndarray, vertices: np.ndarray, edge_labels: np.ndarray, edges: np.ndarray
) -> list[Cluster]:
    """The report entries of the largest clusters, the same on all ranks."""
    largest = heads[np.lexsort((heads["label"], -heads["size"]))[:LISTED]]
    gathered = comm.gather(largest)
    if gathered is not None:
        largest = np.concatenate(gathered)
        largest = largest[np.lexsort((largest["label"], -largest["size"]))[:LISTED]]
    largest = comm.bcast(largest)
    members = _first_rows(comm, largest["label"], labels, vertices, ("-length", "number"), LISTED_DOCUMENTS + 1)
    shown = _first_rows(comm, largest["label"], edge_labels, edges, ("left", "right"), LISTED_DOCUMENTS)
    described = [_described(*entry) for entry in zip(largest, members, shown, strict=True)] if comm.rank == 0 else None
    return comm.bcast(described)


def _first_rows(
    comm: Comm, chosen: np.ndarray, labels: np.ndarray, rows: np.ndarray, order: tuple[str, str], count: int
) -> list[np.ndarray]:
    """The first rows of every chosen cluster, on rank 0. The ranks share the clusters, so that none receives more than a few per rank.

    Args:
        labels: (rows,) clusters of the rows.
        order: fields by which rows are sorted, the second one ascending.
    """
    by_label = np.argsort(chosen)
    places = np.searchsorted(chosen[by_label], labels)
    places[places == len(chosen)] = 0
    mine = np.flatnonzero(chosen[by_label][places] == labels) if len(chosen) else np.empty(0, dtype=np.int64)
    table = np.empty(len(mine), dtype=[("cluster", "<i8"), ("row", rows.dtype)])
    if len(mine):
        table["cluster"], table["row"] = by_label[places[mine]], rows[mine]

    def first(table: np.ndarray) -> np.ndarray:
        main = table["row"][order[0].removeprefix("-")]
        table = table[np.lexsort((table["row"][order[1]], -main if order[0].startswith("-") else main, table["cluster"]))]
        rank_in_cluster = np.arange(len(table)) - np.searchsorted(table["cluster"], table["cluster"])
        return table[rank_in_cluster < count]

    table = first(table)
    table = first(exchange(comm, table, table["cluster"] % comm.size))
    table = first(exchange(comm, table, np.zeros(len(table), dtype=np.int64)))
    bounds = np.searchsorted(table["cluster"], np.arange(len(chosen) + 1))
    return [table["row"][start:stop] for start, stop in itertools.pairwise(bounds)]


def _described(head: np.void, members: np.ndarray, edges: np.ndarray) -> Cluster:
    """Build the report entry of a cluster."""
    best, *others = members["number"].tolist()
    listed = zip(edges["left"].tolist(), edges["right"].tolist(), edges["jaccard"].tolist(), strict=True)
    kind = "near" if head["near"] else "exact"
    return Cluster(best if best >= 0 else None, [number for number in others if number >= 0], int(head["size"]), kind, list(listed))
