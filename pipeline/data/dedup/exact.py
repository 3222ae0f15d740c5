"""Exact duplicates over all ranks: documents with equal keys; the key is a hash of the text or of the URL."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

import numpy as np
import xxhash

from pipeline.common.mpi import Comm
from pipeline.data.dedup import distributed

EDGE = np.dtype(
    [
        ("left", "<i8"),
        ("right", "<i8"),
        ("left_length", "<i8"),
        ("right_length", "<i8"),
        ("left_holder", "<i4"),
        ("right_holder", "<i4"),
        ("jaccard", "<f8"),
        ("exact", "?"),
    ]
)
"""Two duplicate documents, by number, with their lengths and the ranks that hold them; `exact` distinguishes exact from near duplicates."""

SLICE_ROWS = 1 << 22
"""Approximate number of documents of which a rank sends the keys at a time."""

_ROW = np.dtype([("key", "<u8", 2), ("number", "<i8"), ("length", "<i8")])
_BEST = np.dtype([("number", "<i8"), ("length", "<i8"), ("holder", "<i4")])


def keys(texts: Iterable[str]) -> np.ndarray:
    """xxh3_128 of every text: (n, 2) uint64."""
    return keys_of_bytes(text.encode() for text in texts)


def keys_of_bytes(texts: Iterable[bytes | bytearray]) -> np.ndarray:
    """xxh3_128 of every text, encoded as UTF-8: (n, 2) uint64."""
    return np.frombuffer(b"".join(map(xxhash.xxh3_128_digest, texts)), dtype="<u8").reshape(-1, 2)


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


def find(comm: Comm, numbers: np.ndarray, exact: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Find the copies: all documents with the same key except the longest one and, among equals, that with the lowest number. Collective.

    Every rank sends one row for each of its distinct keys to the rank that the key selects: a text that fills a share of the corpus
    costs that rank one row per rank. Temporary memory is about 200 bytes for each of SLICE_ROWS documents.

    Args:
        numbers: (n,) int64 numbers of the documents that this rank holds.
        exact: (n, 2) uint64 keys.
        length: (n,) int64.

    Returns:
        (m,) EDGE from the best document to each of this rank's documents that are copies of it.
    """
    count = distributed.slices(comm, len(numbers), SLICE_ROWS)
    slice_of, edges = distributed.slice_of(exact[:, 0], count), [np.empty(0, dtype=EDGE)]
    for part in range(count):
        mine = np.flatnonzero(slice_of == part)
        rows = np.empty(len(mine), dtype=_ROW)
        rows["key"], rows["number"], rows["length"] = exact[mine], numbers[mine], length[mine]
        rows = rows[_best_first(rows)]
        copy, first = repeated_rows(rows["key"][:, 0], rows["key"][:, 1])
        heads = np.delete(np.arange(len(rows)), copy)
        best = distributed.ask(comm, rows[heads], (rows["key"][heads, 0] % np.uint64(comm.size)).astype(np.int64), _best)
        best_of = np.empty(len(rows), dtype=_BEST)
        best_of[heads] = best
        best_of[copy] = best_of[first]
        worse = np.flatnonzero(best_of["number"] != rows["number"])
        added = np.empty(len(worse), dtype=EDGE)
        for name in _BEST.names or ():
            added[f"left_{name}" if name != "number" else "left"] = best_of[name][worse]
        added["right"], added["right_length"], added["right_holder"] = rows["number"][worse], rows["length"][worse], comm.rank
        added["jaccard"], added["exact"] = 1.0, True
        edges.append(added)
    return np.concatenate(edges)


def _best(rows: np.ndarray, holders: np.ndarray) -> np.ndarray:
    """The best document with the key of every row: (rows,) _BEST."""
    order = _best_first(rows)
    copy, first = repeated_rows(rows["key"][order, 0], rows["key"][order, 1])
    heads = np.arange(len(rows))
    heads[copy] = first
    chosen = np.empty(len(rows), dtype=np.int64)
    chosen[order] = order[heads]
    best = np.empty(len(rows), dtype=_BEST)
    best["number"], best["length"], best["holder"] = rows["number"][chosen], rows["length"][chosen], holders[chosen]
    return best


def _best_first(rows: np.ndarray) -> np.ndarray:
    """The order of _ROW by key, the best document of each first."""
    return np.lexsort((rows["number"], -rows["length"], rows["key"][:, 1], rows["key"][:, 0]))


def repeated_rows(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In sorted columns: the indices of the rows that equal their predecessor, and for each the index of the first equal row."""
    count = len(columns[0])
    same = np.zeros(count, dtype=bool)
    same[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    first = np.maximum.accumulate(np.where(same, 0, np.arange(count)))
    return np.flatnonzero(same), first[same]
