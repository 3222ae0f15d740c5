"""Exact duplicates over all ranks: documents with equal keys, the key being a hash of the text, or of the URL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

import numpy as np
import xxhash

from pipeline.data.mpi import Comm, exchange

EDGE = np.dtype([("left", "<i8"), ("right", "<i8"), ("jaccard", "<f8"), ("exact", "?")])
"""Two documents, by number, that are the same (exact) or nearly so."""

_ROW = np.dtype([("key", "<u8", 2), ("number", "<i8"), ("score", "<i8"), ("holder", "<i4")])


def keys(texts: Iterable[str]) -> np.ndarray:
    """xxh3_128 of every text: (n, 2) uint64."""
    return np.frombuffer(b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts), dtype="<u8").reshape(-1, 2)


def url_keys(urls: Sequence[str]) -> np.ndarray:
    """xxh3_128 of every URL after normal_url: (n, 2) uint64."""
    return keys(map(normal_url, urls))


def normal_url(url: str) -> str:
    """A URL without what rarely makes another page: scheme, `www.`, default port, fragment, last slash, upper case in the host's name."""
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname or "", parts.port
    except ValueError:  # a port that is no number, half an IPv6 address: still a name
        return url.strip()
    if not host:
        return url.strip()
    named_port = f":{port}" if port not in (None, 80, 443) else ""
    query = f"?{parts.query}" if parts.query else ""
    return f"{host.removeprefix('www.')}{named_port}{parts.path.rstrip('/')}{query}"


def find(comm: Comm, numbers: np.ndarray, exact: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All documents of one key but the best, which is that of highest score and, among equals, of lowest number.

    Every key travels to the rank that it names (44 bytes a document, twice in memory for a while). All ranks call this.

    Args:
        numbers: (n,) int64 numbers of the documents that this rank holds.
        exact: (n, 2) uint64 keys.
        score: (n,) int64.

    Returns:
        copies: numbers of this rank's documents that have a better equal, sorted.
        edges: (m,) EDGE from the best document to each of its copies, for the keys that travelled here.
    """
    rows = np.empty(len(numbers), dtype=_ROW)
    rows["key"], rows["number"], rows["score"], rows["holder"] = exact, numbers, score, comm.rank
    rows = exchange(comm, rows, (exact[:, 0] % np.uint64(comm.size)).astype(np.int64))
    rows = rows[np.lexsort((rows["number"], -rows["score"], rows["key"][:, 1], rows["key"][:, 0]))]
    copy, first = same_as_before(rows["key"][:, 0], rows["key"][:, 1])
    edges = np.empty(len(copy), dtype=EDGE)
    edges["left"], edges["right"], edges["jaccard"], edges["exact"] = rows["number"][first], rows["number"][copy], 1.0, True
    return np.sort(exchange(comm, rows["number"][copy], rows["holder"][copy])), edges


def same_as_before(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In sorted columns: the places of the rows that equal the row before, and for each the place of the first row that it equals."""
    count = len(columns[0])
    same = np.zeros(count, dtype=bool)
    same[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    first = np.maximum.accumulate(np.where(same, 0, np.arange(count)))
    return np.flatnonzero(same), first[same]
