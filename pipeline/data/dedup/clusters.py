"""Clusters of duplicates: stars, whose center is the document that is kept; every other document is a duplicate of the center."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field, replace
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
        dropped: numbers of the first LISTED_DOCUMENTS dropped documents, the longest first.
        jaccard: of each of them, the Jaccard index with the document that is kept; estimated if that belongs to dedup.against.
        size: total documents, including the kept one.
        kind: "exact" if all are copies of one text (or have the same URL), else "near".
    """

    kept: int | None
    dropped: list[int]
    jaccard: list[float]
    size: int
    kind: str


class ClusterKind(IntEnum):
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
        chained: number of kept documents that a chain of near duplicates connects with a better one.
        sizes: cluster size in documents -> number of clusters.
        spans: number of "documents" that dedup.spans shortens, and of "spans" and "words" that it removes; empty without it.
    """

    drop: np.ndarray
    origin: np.ndarray
    exact: int
    near: int
    chained: int
    clusters: list[Cluster]
    sizes: dict[int, int]
    spans: dict[str, int] = field(default_factory=dict)


NOTHING = Clusters(np.empty(0, np.int64), np.empty(0, ORIGIN), 0, 0, 0, [], {})
"""No duplicates."""

_HEAD = np.dtype([("kept", "<i8"), ("size", "<i8"), ("near", "?")])
"""A cluster, or the part of it on one rank: its kept document, the number of dropped ones, whether one of them is a near duplicate."""


def to_json(clusters: Clusters) -> dict[str, Any]:
    """All fields except `drop` and `origin`, as JSON."""
    plain = dataclasses.asdict(replace(clusters, drop=clusters.drop[:0], origin=clusters.origin[:0]))
    return {**plain, "drop": None, "origin": None, "sizes": list(clusters.sizes.items())}


def from_json(encoded: dict[str, Any], drop: np.ndarray, origin: np.ndarray) -> Clusters:
    """Restore Clusters from the result of `to_json`, `drop` and `origin`."""
    listed = [Cluster(**cluster) for cluster in encoded["clusters"]]
    return Clusters(**{**encoded, "drop": drop, "origin": origin, "clusters": listed, "sizes": dict(encoded["sizes"])})


def joined(first: Clusters, second: Clusters) -> Clusters:
    """Combine two successive searches, the second one over the documents that the first one kept."""
    sizes = {size: first.sizes.get(size, 0) + second.sizes.get(size, 0) for size in sorted(first.sizes.keys() | second.sizes.keys())}
    listed = sorted([*first.clusters, *second.clusters], key=lambda cluster: -cluster.size)[:LISTED]
    drop, origin = (np.concatenate([getattr(search, name) for search in (first, second)]) for name in ("drop", "origin"))
    order = np.argsort(drop)
    exact, near, chained = (getattr(first, name) + getattr(second, name) for name in ("exact", "near", "chained"))
    return Clusters(drop[order], origin[order], exact, near, chained, listed, sizes)


def near_stars(comm: Comm, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decide which documents of near-duplicate pairs are kept: from the best one on, each that is no duplicate of a kept one. Collective.

    Args:
        edges: (n,) EDGE of this rank, each pair once over all ranks; left is the better document: the longer one, then the lower number.

    Returns:
        stars: (m,) EDGE: for every dropped document that this rank holds, the edge from the best kept document.
        kept: sorted numbers of the documents in edges that this rank holds and that are kept.
    """
    edges = exchange(comm, edges, edges["left_holder"])
    edges = edges[np.argsort(edges["left"], kind="stable")]
    vertices, chosen = distributed.greedy_independent_set(comm, edges)
    centers = edges[chosen[np.searchsorted(vertices, edges["left"])]]
    stars = exchange(comm, centers, centers["right_holder"])
    stars = stars[np.lexsort((stars["left"], -stars["left_length"], stars["right"]))]
    return stars[np.unique(stars["right"], return_index=True)[1]], vertices[chosen]


def resolve(comm: Comm, copies: np.ndarray, near: np.ndarray, stars: np.ndarray) -> Clusters:
    """Describe the clusters. Collective.

    Documents of other corpora have negative numbers and are never dropped. Every rank holds its edges and its share of the documents in
    them, which is about 600 bytes per edge.

    Args:
        copies: (n,) EDGE between exact duplicates, on the rank that holds the copy, which is `right` and in no near edge.
        near: (n,) EDGE of this rank between near duplicates.
    """
    vertices, labels = distributed.components(comm, *(np.concatenate([copies[side], near[side]]) for side in ("left", "right")))
    in_chains = int(np.count_nonzero((vertices >= 0) & (vertices != labels)))  # dropped if one document of a component were kept
    chained = sum(comm.allgather(in_chains - len(copies) - len(stars)))
    members = np.concatenate([_with_centers(comm, copies, stars), stars])
    members = members[np.argsort(members["right"])]
    origin = np.empty(len(members), dtype=ORIGIN)
    origin["kept"], origin["kind"] = members["left"], np.where(members["exact"], ClusterKind.EXACT, ClusterKind.NEAR)
    heads = _heads(comm, members)
    sizes: dict[int, int] = {}
    for histogram in comm.allgather(dict(zip(*(values.tolist() for values in np.unique(heads["size"], return_counts=True)), strict=True))):
        for size, number in histogram.items():
            sizes[size + 1] = sizes.get(size + 1, 0) + number
    exact, number = (sum(comm.allgather(count)) for count in (len(copies), len(members)))
    listed = _listed(comm, heads, members)
    return Clusters(members["right"].copy(), origin, exact, number - exact, chained, listed, dict(sorted(sizes.items())))


def _with_centers(comm: Comm, copies: np.ndarray, stars: np.ndarray) -> np.ndarray:
    """The edges of copies, from the document that is kept: of which the original may be a near duplicate."""

    def center(numbers: np.ndarray, _: np.ndarray) -> np.ndarray:
        places = np.searchsorted(stars["right"], numbers)
        centers = np.zeros(len(numbers), dtype=stars.dtype)
        centers["left"], centers["jaccard"] = numbers, 1
        if len(stars):
            places = np.minimum(places, len(stars) - 1)
            dropped = stars["right"][places] == numbers
            centers[dropped] = stars[places[dropped]]
        return centers

    centers = distributed.ask(comm, copies["left"], copies["left_holder"], center)
    copies = copies.copy()
    copies["left"], copies["jaccard"] = centers["left"], centers["jaccard"]
    return copies


def _heads(comm: Comm, members: np.ndarray) -> np.ndarray:
    """The clusters that this rank describes: (n,) _HEAD. A rank sends one row for each cluster that it has a part of."""
    parts = np.empty(len(members), dtype=_HEAD)
    parts["kept"], parts["size"], parts["near"] = members["left"], 1, ~members["exact"] | (members["jaccard"] < 1)
    parts = _merged(parts)
    return _merged(exchange(comm, parts, parts["kept"] % comm.size))


def _merged(parts: np.ndarray) -> np.ndarray:
    """Merge rows of the same cluster."""
    parts = parts[np.argsort(parts["kept"], kind="stable")]
    starts = np.unique(parts["kept"], return_index=True)[1]
    merged = parts[starts]
    if len(merged):
        merged["size"] = np.add.reduceat(parts["size"], starts)
        merged["near"] = np.logical_or.reduceat(parts["near"], starts)
    return merged


def _listed(comm: Comm, heads: np.ndarray, members: np.ndarray) -> list[Cluster]:
    """The report entries of the largest clusters, the same on all ranks."""
    largest = heads[np.lexsort((heads["kept"], -heads["size"]))[:LISTED]]
    gathered = comm.gather(largest)
    if gathered is not None:
        largest = np.concatenate(gathered)
        largest = largest[np.lexsort((largest["kept"], -largest["size"]))[:LISTED]]
    largest = comm.bcast(largest)
    shown = _first_members(comm, largest["kept"], members)
    if comm.rank != 0:
        return comm.bcast(None)
    described = []
    for head, rows in zip(largest, shown, strict=True):
        kept, kind = int(head["kept"]), "near" if head["near"] else "exact"
        dropped, jaccard = rows["right"].tolist(), rows["jaccard"].tolist()
        described.append(Cluster(kept if kept >= 0 else None, dropped, jaccard, 1 + int(head["size"]), kind))
    return comm.bcast(described)


def _first_members(comm: Comm, chosen: np.ndarray, members: np.ndarray) -> list[np.ndarray]:
    """LISTED_DOCUMENTS of every chosen cluster, the longest first, on rank 0. The ranks share the clusters: none receives many rows."""
    by_label, labels = np.argsort(chosen), members["left"]
    places = np.searchsorted(chosen[by_label], labels)
    places[places == len(chosen)] = 0
    mine = np.flatnonzero(chosen[by_label][places] == labels) if len(chosen) else np.empty(0, dtype=np.int64)
    table = np.empty(len(mine), dtype=[("cluster", "<i8"), ("row", members.dtype)])
    if len(mine):
        table["cluster"], table["row"] = by_label[places[mine]], members[mine]

    def first(table: np.ndarray) -> np.ndarray:
        table = table[np.lexsort((table["row"]["right"], -table["row"]["right_length"], table["cluster"]))]
        rank_in_cluster = np.arange(len(table)) - np.searchsorted(table["cluster"], table["cluster"])
        return table[rank_in_cluster < LISTED_DOCUMENTS]

    table = first(table)
    table = first(exchange(comm, table, table["cluster"] % comm.size))
    table = first(exchange(comm, table, np.zeros(len(table), dtype=np.int64)))
    bounds = np.searchsorted(table["cluster"], np.arange(len(chosen) + 1))
    return [table["row"][start:stop] for start, stop in itertools.pairwise(bounds)]
