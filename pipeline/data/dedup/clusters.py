"""Clusters of duplicates: what the edges between documents connect, and which document of each cluster stays."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

LISTED = 200
"""Clusters that are kept for the report, the largest."""

LISTED_DOCUMENTS = 50
"""Documents of one cluster that are kept for the report."""


@dataclass(frozen=True)
class Cluster:
    """Duplicates of each other, as the report shows them.

    Attributes:
        kept: number of the document that stays; None when that is one of a corpus in dedup.against.
        dropped: numbers of the others, of the best LISTED_DOCUMENTS.
        size: documents in all, the kept one and those of dedup.against included.
        kind: exact, when all are copies of one text (or have one URL); near otherwise.
        edges: (number, number, Jaccard index) of the pairs that were compared, the first LISTED_DOCUMENTS; documents of dedup.against have
            negative numbers and an estimated index.
    """

    kept: int | None
    dropped: list[int]
    size: int
    kind: str
    edges: list[tuple[int, int, float]]


@dataclass(frozen=True)
class Clusters:
    """What was found in a corpus. The same on all ranks, whatever their number.

    Attributes:
        drop: (n,) int64 numbers of the documents to leave out, sorted: 8 bytes each, on every rank.
        exact: how many of them copy another document's text.
        near: how many resemble another document.
        clusters: the largest, for the report.
        sizes: documents in a cluster -> clusters of that size.
    """

    drop: np.ndarray
    exact: int
    near: int
    clusters: list[Cluster]
    sizes: dict[int, int]


NOTHING = Clusters(np.empty(0, np.int64), 0, 0, [], {})
"""No duplicates."""


def to_json(found: Clusters) -> dict[str, Any]:
    """All of it but `drop`."""
    return {**dataclasses.asdict(replace(found, drop=found.drop[:0])), "drop": None, "sizes": list(found.sizes.items())}


def from_json(noted: dict[str, Any], drop: np.ndarray) -> Clusters:
    """What `to_json` made, and `drop`."""
    listed = [Cluster(**cluster) for cluster in noted["clusters"]]
    return Clusters(**{**noted, "drop": drop, "clusters": listed, "sizes": dict(noted["sizes"])})


def joined(first: Clusters, second: Clusters) -> Clusters:
    """Two searches one after the other, the second among what the first left."""
    sizes = {size: first.sizes.get(size, 0) + second.sizes.get(size, 0) for size in sorted(first.sizes.keys() | second.sizes.keys())}
    listed = sorted([*first.clusters, *second.clusters], key=lambda cluster: -cluster.size)[:LISTED]
    return Clusters(np.union1d(first.drop, second.drop), first.exact + second.exact, first.near + second.near, listed, sizes)


def components(left: np.ndarray, right: np.ndarray, count: int) -> np.ndarray:
    """The connected components of a graph: every vertex points to its component's lowest, found by hooking and pointer jumping.

    Shiloach & Vishkin 1982, "An O(log n) parallel connectivity algorithm": union-find without a loop over edges.

    Args:
        left: (edges,) vertices.
        right: (edges,) their neighbours.
        count: vertices.

    Returns:
        (count,) int64, the lowest vertex of the component of each.
    """
    parent = np.arange(count)
    while True:
        a, b = parent[left], parent[right]
        apart = np.flatnonzero(a != b)
        if not len(apart):
            return parent
        left, right = left[apart], right[apart]  # what is connected stays so
        a, b = a[apart], b[apart]
        np.minimum.at(parent, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(jumped := parent[parent], parent):
            parent = jumped


def documents_of(edges: np.ndarray) -> np.ndarray:
    """The numbers of all documents that edges touch, sorted."""
    return np.unique(np.concatenate([edges["left"], edges["right"]]))


def resolve(edges: np.ndarray, scores: np.ndarray) -> Clusters:
    """Keep the best document of every cluster: highest score, then lowest number. Negative numbers are of other corpora and never dropped.

    Takes 3.5 us and some 140 bytes an edge, on the one rank that calls it.

    Args:
        edges: (n,) EDGE between documents that are duplicates, each pair once, in any order; `right` of an exact one is the copy.
        scores: int64 scores of documents_of(edges).
    """
    edges = edges[np.lexsort((edges["right"], edges["left"]))]
    numbers = documents_of(edges)
    left, right = np.searchsorted(numbers, edges["left"]), np.searchsorted(numbers, edges["right"])
    labels = components(left, right, len(numbers))
    order = np.lexsort((numbers, -scores, labels))  # cluster by cluster, in each the best first
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    drop = np.sort(np.delete(numbers[order], starts))
    drop = drop[drop >= 0]
    copies = int(np.count_nonzero(edges["exact"]))

    by_cluster = np.argsort(labels[left], kind="stable")
    edges = edges[by_cluster]
    edge_bounds = np.append(np.searchsorted(labels[left][by_cluster], labels[order[starts]]), len(edges))
    largest = np.argsort(-sizes, kind="stable")[:LISTED].tolist()
    listed = [_described(numbers[order[starts[i] : starts[i] + sizes[i]]], edges[edge_bounds[i] : edge_bounds[i + 1]]) for i in largest]
    histogram = dict(zip(*(values.tolist() for values in np.unique(sizes, return_counts=True)), strict=True))
    return Clusters(drop, copies, len(drop) - copies, listed, histogram)


def _described(members: np.ndarray, edges: np.ndarray) -> Cluster:
    """A cluster for people."""
    best, *others = members[: LISTED_DOCUMENTS + 1].tolist()
    shown = edges[:LISTED_DOCUMENTS]
    listed = zip(shown["left"].tolist(), shown["right"].tolist(), shown["jaccard"].tolist(), strict=True)
    kind = "exact" if edges["exact"].all() else "near"
    return Cluster(best if best >= 0 else None, [number for number in others if number >= 0], len(members), kind, list(listed))
