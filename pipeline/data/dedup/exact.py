"""Exact duplicates over all ranks: documents with equal keys; the key is a hash of the text or of the URL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

import numpy as np
import xxhash

from pipeline.common.mpi import Comm, exchange

EDGE = np.dtype([("left", "<i8"), ("right", "<i8"), ("jaccard", "<f8"), ("exact", "?")])
"""Two duplicate documents, by number; `exact` distinguishes exact from near duplicates."""

_ROW = np.dtype([("key", "<u8", 2), ("number", "<i8"), ("score", "<i8"), ("holder", "<i4")])


def keys(texts: Iterable[str]) -> np.ndarray:
    """xxh3_128 of every text: (n, 2) uint64."""
    return np.frombuffer(b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts), dtype="<u8").reshape(-1, 2)


def url_keys(urls: Sequence[str]) -> np.ndarray:
    """xxh3_128 of every URL after normal_url: (n, 2) uint64."""
    return keys(map(normal_url, urls))


def normal_url(url: str) -> str:
    """Normalize a URL: without scheme, `www.`, default port, fragment and trailing slash; the host name in lower case."""
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname or "", parts.port
    except ValueError:  # invalid port or IPv6 address: keep the URL as it is
        return url.strip()
    if not host:
        return url.strip()
    named_port = f":{port}" if port not in (None, 80, 443) else ""
    query = f"?{parts.query}" if parts.query else ""
    return f"{host.removeprefix('www.')}{named_port}{parts.path.rstrip('/')}{query}"


def find(comm: Comm, numbers: np.ndarray, exact: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the copies: all documents with the same key except the one with the highest score and, among equals, the lowest number.

    Every key is sent to the rank that it selects (44 bytes per document, temporarily twice in memory). Collective.

    Args:
        numbers: (n,) int64 numbers of the documents that this rank holds.
        exact: (n, 2) uint64 keys.
        score: (n,) int64.

    Returns:
        copies: sorted numbers of this rank's documents that are copies of a better one.
        edges: (m,) EDGE from the best document to each of its copies, for the keys sent to this rank.
    """
    rows = np.empty(len(numbers), dtype=_ROW)
    rows["key"], rows["number"], rows["score"], rows["holder"] = exact, numbers, score, comm.rank
    rows = exchange(comm, rows, (exact[:, 0] % np.uint64(comm.size)).astype(np.int64))
    rows = rows[np.lexsort((rows["number"], -rows["score"], rows["key"][:, 1], rows["key"][:, 0]))]
    copy, first = repeated_rows(rows["key"][:, 0], rows["key"][:, 1])
    edges = np.empty(len(copy), dtype=EDGE)
    edges["left"], edges["right"], edges["jaccard"], edges["exact"] = rows["number"][first], rows["number"][copy], 1.0, True
    return np.sort(exchange(comm, rows["number"][copy], rows["holder"][copy])), edges


def repeated_rows(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In sorted columns: the indices of the rows that equal their predecessor, and for each the index of the first equal row."""
    count = len(columns[0])
    same = np.zeros(count, dtype=bool)
    same[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    first = np.maximum.accumulate(np.where(same, 0, np.arange(count)))
    return np.flatnonzero(same), first[same]
