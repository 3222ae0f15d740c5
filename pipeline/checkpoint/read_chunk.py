"""The spans of a chunk in memory: where they are read to, their checksums, and the copies to their place. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.lib.stride_tricks import as_strided

from pipeline.checkpoint.read_plan import FilePlan, Integers, ReadSource

Bytes = npt.NDArray[np.uint8]
Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class BadBytes:
    """Bytes of a source that are not as they were written.

    Attributes:
        source: the part and kind.
        first: first byte in the part.
        last: end in the part.
        reason: what is wrong, after the name of the file.
    """

    source: ReadSource
    first: int
    last: int
    reason: str


def positions(spans: Integers, starts: Integers) -> Integers:
    """Where each span is in the scratch buffer: spans and gaps that one call reads are contiguous."""
    lengths = spans[np.append(starts[1:], len(spans)) - 1, 1] - spans[starts, 0]
    base = np.cumsum(lengths) - lengths
    call = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(spans))))
    positions: Integers = base[call] + spans[:, 0] - spans[starts[call], 0]
    return positions


def whole(spans: Integers, pieces: Integers, first: int) -> Integers:
    """For each span, the piece that alone covers it, which is read into its place; -1 for none."""
    owners = pieces[:, 4] - first
    whole = np.full(len(spans), -1)
    covers = (pieces[:, 0] == spans[owners, 0]) & (pieces[:, 1] == spans[owners, 1] - spans[owners, 0])
    covers &= np.bincount(owners, minlength=len(spans))[owners] == 1
    whole[owners[covers]] = np.flatnonzero(covers)
    return whole


def places(
    spans: Integers, position: Integers, pieces: Integers, whole: Integers, scratch: Bytes, buffers: Sequence[Bytes]
) -> list[memoryview]:
    """The memory that each span is read into."""
    places = []
    for (low, high, _), at, piece in zip(spans.tolist(), position.tolist(), whole.tolist(), strict=True):
        if piece < 0:
            places.append(scratch[at : at + high - low].data)
        else:
            _, size, target, to, _ = pieces[piece].tolist()
            places.append(buffers[target][to : to + size].data)
    return places


def vectors(spans: Integers, position: Integers, places: list[memoryview], scratch: Bytes) -> list[memoryview]:
    """The memory of spans that one call reads, with that of the gaps between them."""
    vectors = places[:1]
    for number in range(1, len(places)):
        if gap := int(spans[number, 0] - spans[number - 1, 1]):
            at = int(position[number])
            vectors.append(scratch[at - gap : at].data)
        vectors.append(places[number])
    return vectors


def verify(plan: FilePlan, first: int, last: int, places: list[memoryview], expected: Digests) -> list[BadBytes]:
    """Compare the blocks of spans `first : last` with their checksums; blocks of a span in a row that differ are one damage."""
    spans, (origin, block, _) = plan.spans[first:last], plan.blocks[first:last].T
    begin = (spans[:, 0] - origin) // block
    counts = -(-(spans[:, 1] - origin) // block) - begin
    ends = np.cumsum(counts)
    span = np.repeat(np.arange(len(spans)), counts)
    number = begin[span] + np.arange(ends[-1]) - (ends - counts)[span]
    low = np.maximum(origin[span] + number * block[span], spans[span, 0])  # the first and the last block of a part may be shorter
    high = np.minimum(origin[span] + (number + 1) * block[span], spans[span, 1])
    digests = np.fromiter(_digests(places, (low - spans[span, 0]).tolist(), (high - spans[span, 0]).tolist(), counts.tolist()), np.uint64)
    damaged = []
    bad = np.flatnonzero(digests != expected)
    for run in np.split(bad, np.flatnonzero((np.diff(bad) > 1) | (np.diff(span[bad]) > 0)) + 1) if len(bad) else ():
        source = plan.sources[int(spans[span[run[0]], 2])]
        damaged.append(BadBytes(source, int(low[run[0]]) - source.offset, int(high[run[-1]]) - source.offset, "differs from its checksum"))
    return damaged


def _digests(places: list[memoryview], low: list[int], high: list[int], counts: list[int]) -> Iterator[int]:
    """The checksums of the blocks `low : high` of spans, of which each has a number of blocks."""
    digest_of = xxhash.xxh3_64_intdigest
    first = 0
    for place, count in zip(places, counts, strict=True):
        last = first + count
        if count > 2:  # blocks of the same size between the first and the last one
            yield digest_of(place[: high[first]])
            blocks: Any = np.frombuffer(place[low[first + 1] : low[last - 1]], np.uint8).reshape(count - 2, -1)
            yield from map(digest_of, blocks)
            yield digest_of(place[low[last - 1] :])
        else:
            for begin, end in zip(low[first:last], high[first:last], strict=True):
                yield digest_of(place[begin:end])
        first = last


def copy(pieces: Integers, scratch: Bytes, at: Integers, buffers: Sequence[Bytes]) -> None:
    """Copy pieces from the scratch buffer into their place; pieces at regular distances, as those of a slice, with one call.

    Args:
        pieces: as in FilePlan.
        scratch: the buffer that they were read into.
        at: position of each piece in it.
        buffers: what they go to.
    """
    if not len(pieces):
        return
    _, size, target, to, _ = pieces.T
    step, step_to = np.diff(at), np.diff(to)
    regular = (size[1:] == size[:-1]) & (target[1:] == target[:-1])
    # A group ends before the first piece that is at another distance than the one before it.
    changes = np.flatnonzero(~(regular[1:] & regular[:-1] & (step[1:] == step[:-1]) & (step_to[1:] == step_to[:-1]))) + 1
    ends = np.append(changes, len(regular)).tolist()
    first = next_change = 0
    while first < len(pieces):
        while next_change < len(ends) - 1 and ends[next_change] <= first:
            next_change += 1
        last = ends[next_change] if first < len(regular) and regular[first] else first
        rows, length = last - first + 1, int(size[first])
        source, place = scratch[int(at[first]) :], buffers[int(target[first])][int(to[first]) :]
        if rows == 1:
            place[:length] = source[:length]
        else:
            strides = [(int(steps[first]), 1) for steps in (step, step_to)]
            values, places = (as_strided(array, (rows, length), stride) for array, stride in zip((source, place), strides, strict=True))
            places[:] = values
        first = last + 1
