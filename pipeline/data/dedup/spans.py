"""Exact repeated spans over the entire corpus (ExactSubstr of Lee et al. 2022, "Deduplicating training data makes language models better").

A document is a sequence of units (Words.units): words with their punctuation. A window is `length` consecutive units of a document. It is
repeated if its units occur in a document of lower number, or at least `length` units earlier in its own. The units of all repeated windows
are removed: a span of at least `length` units stays where it occurs first, without what still earlier documents have of it. The result
depends on the texts and their order alone.

Windows are compared by hashes of 128 bits: that any two different ones of the 10^13 windows of 60 TB have equal hashes has a probability of
10^26 / 2^129 = 1e-13. With 64 bits, there would be 10^26 / 2^65 = 3 million such pairs. A unit has 64 bits: windows that differ in a single
one, as those of a form, have equal hashes with a probability of 2^-64 = 5e-20 a pair.

Few windows have to be compared. The anchor of a window is the lowest hash of its runs of length // 2 units (minimizers, Roberts et al.
2004, "Reducing storage requirements for biological sequence comparison"). Equal windows have equal anchors: a window whose anchor occurs at
one place of the corpus is not repeated. One of about length / 4 units begins an anchor. As anchors only exclude, 64 bits are enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pipeline.common.mpi import Comm
from pipeline.data.dedup import distributed
from pipeline.data.dedup.exact import repeated_rows
from pipeline.data.words import Words, mix

WINDOW = np.dtype([("hash", "<u8", 2), ("number", "<i8"), ("index", "<u4")])
"""A window: its hash, the number of its document, and its first unit."""

_MULTIPLIER, _SECOND = np.uint64(0xD1342543DE82EF95), np.uint64(0x9E3779B97F4A7C15)


class Windows:
    """The windows of a batch of texts.

    Attributes:
        texts: (windows,) the index of the text of each.
        indices: (windows,) their first units, in the units of their text.
        anchors: (windows,) uint64.
    """

    def __init__(self, texts: Sequence[str], length: int) -> None:
        words = Words(texts, exact=True)
        units = words.units
        self._hashes, self._length = words.hash_spans(units), length
        self._starts = np.flatnonzero(np.arange(length, len(units) + length) <= units.offsets[1:][units.texts])
        self.texts = units.texts[self._starts]
        self.indices = self._starts - units.offsets[self.texts]
        lowest, reach = _of_runs(self._hashes, length // 2), 1
        while reach <= length - length // 2:
            step = min(reach, length - length // 2 + 1 - reach)
            lowest, reach = np.minimum(lowest[:-step], lowest[step:]), reach + step
        self.anchors = mix(lowest[self._starts])  # mixed, as the lowest of several hashes are not uniform

    def distinct_anchors(self) -> np.ndarray:
        """The anchor of every run of windows with one anchor: (n,) uint64; twice if two of them do not overlap."""
        begins = np.flatnonzero((np.diff(self.anchors, prepend=~self.anchors[:1]) != 0) | (np.diff(self.texts, prepend=-1) != 0))
        lengths = np.diff(begins, append=len(self.anchors))
        return np.repeat(self.anchors[begins], 1 + (lengths > self._length))

    def hashes(self, chosen: np.ndarray) -> np.ndarray:
        """The hashes of the windows with these indices: (chosen, 2) uint64."""
        lanes = (self._hashes, mix(self._hashes + _SECOND))
        return np.stack([_of_runs(lane, self._length)[self._starts[chosen]] for lane in lanes], axis=1)


def _of_runs(hashes: np.ndarray, length: int) -> np.ndarray:
    """Hash every run of `length` hashes: (n,) -> (n - length + 1,). A run is hashed from two shorter ones, which may overlap."""
    reach = 1
    while reach < length:
        step = min(reach, length - reach)
        hashes = mix(hashes[:-step] * _MULTIPLIER + hashes[step:])
        reach += step
    return hashes


def several(comm: Comm, anchors: np.ndarray) -> np.ndarray:
    """Which anchors occur more than once on all ranks together: (anchors,) bool. Collective."""

    def answer(rows: np.ndarray, _: np.ndarray) -> np.ndarray:
        distinct, places = np.unique(rows["hash"], return_inverse=True)
        return (np.bincount(places, 1 + rows["several"], len(distinct)) > 1)[places]

    distinct, places, counts = np.unique(anchors, return_inverse=True, return_counts=True)
    rows = np.empty(len(distinct), dtype=[("hash", "<u8"), ("several", "?")])
    rows["hash"], rows["several"] = distinct, counts > 1
    return distributed.ask(comm, rows, (distinct % np.uint64(comm.size)).astype(np.int64), answer)[places]


def repeated(comm: Comm, windows: np.ndarray, length: int) -> np.ndarray:
    """Which windows are repeated: (windows,) bool. A rank has all windows of its documents with the hashes of (n,) `windows`. Collective.

    A rank asks once for each distinct window: one that is in many documents does not fill the memory of its owner.
    """

    def in_lower_documents(rows: np.ndarray, _: np.ndarray) -> np.ndarray:
        order = np.lexsort((rows["number"], *rows["hash"].T))
        found = np.zeros(len(rows), dtype=bool)
        found[order[repeated_rows(*rows["hash"][order].T)[0]]] = True
        return found

    order = np.lexsort((windows["index"], windows["number"], *windows["hash"].T))
    rows = windows[order]
    later, first = repeated_rows(*rows["hash"].T)
    heads = np.delete(np.arange(len(rows)), later)
    found = np.empty(len(rows), dtype=bool)
    owners = (rows["hash"][heads, 1] % np.uint64(comm.size)).astype(np.int64)
    found[heads] = distributed.ask(comm, rows[heads], owners, in_lower_documents)
    apart = (rows["number"][later] > rows["number"][first]) | (rows["index"][later] >= rows["index"][first] + length)
    found[later] = found[first] | apart
    flags = np.empty(len(rows), dtype=bool)
    flags[order] = found
    return flags


def without(text: str, cuts: Iterable[Sequence[int]]) -> str:
    """Remove units first <= unit < stop; `cuts` are sorted and apart. Of the whitespace on both sides, that with more newlines stays."""
    units, kept, end = Words([text], exact=True).units, [], 0
    for first, stop in cuts:
        before = text[end : units.starts[first]]
        end = int(units.starts[stop]) if stop < len(units) else len(text)
        bare = before.rstrip()
        spaces = (before[len(bare) :], text[units.ends[stop - 1] : end]) if first > 0 and stop < len(units) else ("",)
        kept += [bare, max(spaces, key=lambda space: space.count("\n"))]
    return "".join([*kept, text[end:]])
