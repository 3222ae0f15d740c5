"""Which bytes of the data files a reader reads, in which order, and where they go: arithmetic alone, without torch.

The words, after those of parts.py:

- A *stretch* is a range of bytes of a part that is contiguous in the file and where it goes.
- A *span* is a range of blocks of a part that is read and verified as a whole. A span that one stretch covers is read into its place; of
  others the wanted bytes are copied.
- Spans with small gaps between them are read with one call. A *chunk* is the spans that one thread reads at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

#: Bytes that a thread reads at a time, except for longer gaps and blocks.
CHUNK = 4 << 20
#: Bytes from which blocks that one stretch covers are read into their place, instead of being copied there.
DIRECT = 64 << 10
#: The longest gap between spans that is read with them, and the limit of all bytes read, relative to the wanted ones, up to which it is.
GAP, LIMIT = 64 << 10, 1.1


@dataclass(frozen=True)
class ReadSource:
    """A part and kind in a data file, and the bytes of it that are wanted.

    Attributes:
        number: of the source, for messages.
        file: number of the data file.
        offset: of the first byte in the file.
        size: bytes of the part and kind.
        block: bytes of a block.
        before: bytes by which the first block is shorter.
        digest: position of the first block's checksum in the block digests of the file; -1 if the file has none.
        target: number of the buffer that the bytes go to.
        stretches: (stretches, 3): first byte in the part, first byte in the buffer, number of bytes; ascending.
    """

    number: int
    file: int
    offset: int
    size: int
    block: int
    before: int
    digest: int
    target: int
    stretches: Integers

    def first_blocks(self, position: Integers) -> Integers:
        """Round bytes of the part down to the first byte of their block."""
        return np.maximum((position + self.before) // self.block * self.block - self.before, 0)

    def last_blocks(self, position: Integers) -> Integers:
        """Round bytes of the part up to the end of a block."""
        return np.minimum(-(-(position + self.before) // self.block) * self.block - self.before, self.size)


@dataclass(frozen=True)
class FilePlan:
    """What is read of one data file, in the order of the file.

    Attributes:
        spans: (spans, 3): first byte, end, and number of the source whose blocks they are.
        blocks: (spans, 3): byte from which the blocks are counted, bytes of a block, and position in the block digests of the file of the
            block that begins there; the latter is negative if the file has no block digests.
        joined: for each span, whether one call reads it with the span before it, and the gap between them.
        chunks: for each chunk and the end, its first span.
        pieces: (pieces, 5): first byte, number of bytes, number of the buffer, first byte in the buffer, and span; no piece crosses a span.
        sources: what the spans are of.
    """

    file: int
    spans: Integers
    blocks: Integers
    joined: npt.NDArray[np.bool_]
    chunks: Integers
    pieces: Integers
    sources: list[ReadSource]

    @property
    def bytes(self) -> int:
        """Bytes that are read, gaps included."""
        length = self.spans[:, 1] - self.spans[:, 0]
        return int(length.sum() + (self.spans[1:, 0] - self.spans[:-1, 1])[self.joined[1:]].sum())

    def digests(self) -> Integers:
        """For each span, first and last + 1 position of its blocks in the block digests of the file."""
        origin, block, position = self.blocks.T
        first, last = (self.spans[:, 0] - origin) // block, (self.spans[:, 1] - 1 - origin) // block + 1
        return np.stack([position + first, position + last], axis=1)


def plan(sources: Sequence[ReadSource]) -> list[FilePlan]:
    """Plan how to read the wanted bytes of sources; every file that has some is opened once."""
    by_file: dict[int, list[ReadSource]] = {}
    for source in sources:
        by_file.setdefault(source.file, []).append(source)
    spans = {file: _spans(members) for file, members in sorted(by_file.items())}
    gaps = _read_gaps(list(spans.values()), wanted=sum(int(source.stretches[:, 2].sum()) for source in sources))
    plans = []
    for (file, file_spans), joined in zip(spans.items(), gaps, strict=True):
        chunks = _chunks(file_spans)
        joined[chunks[:-1]] = False
        members = by_file[file]
        blocks = np.array([(source.offset - source.before, source.block, source.digest) for source in members])[file_spans[:, 2]]
        plans.append(FilePlan(file, file_spans, blocks, joined, chunks, _pieces(members, file_spans), members))
    return plans


def _spans(sources: list[ReadSource]) -> Integers:
    """The spans of a file: ascending, without overlap, none longer than a chunk unless a block is."""
    wanted = np.concatenate([_blocks(source, number) for number, source in enumerate(sources)])
    wanted = wanted[np.lexsort((wanted[:, 1], wanted[:, 0]))]
    ends = np.maximum.accumulate(wanted[:, 1])
    first = np.flatnonzero(np.concatenate([[True], wanted[1:, 0] >= ends[:-1]]))  # those that overlap become one
    merged = np.stack([wanted[first, 0], np.maximum.reduceat(wanted[:, 1], first), wanted[first, 2]], axis=1)
    block = np.array([source.block for source in sources])[merged[:, 2]]
    step = np.maximum(CHUNK // block, 1) * block
    # A span begins with a block, or with the shorter first one of a part, after which whole blocks follow.
    begin = np.array([source.offset - source.before for source in sources])[merged[:, 2]]
    grid = begin + (merged[:, 0] - begin) // block * block
    counts = np.maximum(-(-(merged[:, 1] - grid) // step), 1)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    low, high, grid, step = (np.repeat(values, counts) for values in (merged[:, 0], merged[:, 1], grid, step))
    begins = np.maximum(grid + number * step, low)
    return np.stack([begins, np.minimum(grid + (number + 1) * step, high), np.repeat(merged[:, 2], counts)], axis=1)


def _blocks(source: ReadSource, number: int) -> Integers:
    """The blocks that the stretches of a source need: (ranges, 3) of first byte and end in the file, and the number of the source."""
    begin, end = source.stretches[:, 0], source.stretches[:, 0] + source.stretches[:, 2]
    first, last = source.first_blocks(begin), source.last_blocks(end)
    # Blocks that a long stretch covers are separated from those at its ends, so that they can be read into their place.
    whole = np.where(first == begin, begin, np.minimum(source.last_blocks(begin + 1), end))
    until = np.where(last == end, end, np.maximum(source.first_blocks(end), begin))
    direct = until - whole >= DIRECT
    pairs = [(first[~direct], last[~direct]), (first[direct], whole[direct]), (whole[direct], until[direct]), (until[direct], last[direct])]
    ranges = np.concatenate([np.stack(pair, axis=1) for pair in pairs])
    ranges = ranges[ranges[:, 0] < ranges[:, 1]] + source.offset
    return np.concatenate([ranges, np.full((len(ranges), 1), number)], axis=1)


def _read_gaps(spans: list[Integers], wanted: int) -> list[npt.NDArray[np.bool_]]:
    """For each file and span, whether the gap before the span is read: the smallest gaps, as far as the limit allows."""
    if not spans:
        return []
    gaps = [np.concatenate([[GAP + 1], of_file[1:, 0] - of_file[:-1, 1]]) for of_file in spans]
    together = np.concatenate(gaps)
    allowed = LIMIT * wanted - sum(int((of_file[:, 1] - of_file[:, 0]).sum()) for of_file in spans)
    order = np.argsort(together, kind="stable")
    small = np.zeros(len(together), np.bool_)
    small[order] = (np.cumsum(together[order]) <= allowed) & (together[order] <= GAP)
    small |= together == 0
    return np.split(small, np.cumsum([len(of_file) for of_file in spans])[:-1])


def _chunks(spans: Integers) -> Integers:
    """The first span of each chunk, and the number of spans."""
    length = spans[:, 1] - spans[:, 0]
    number = (np.cumsum(length) - length) // CHUNK
    first = np.flatnonzero(np.concatenate([[True], number[1:] != number[:-1]]))
    return np.append(first, len(spans))


def _pieces(sources: list[ReadSource], spans: Integers) -> Integers:
    """The wanted stretches, divided at the ends of spans."""
    parts = []
    for source in sources:
        target = np.full(len(source.stretches), source.target)
        parts.append(np.stack([source.stretches[:, 0] + source.offset, source.stretches[:, 2], target, source.stretches[:, 1]], axis=1))
    wanted = np.concatenate(parts)
    wanted = wanted[np.argsort(wanted[:, 0], kind="stable")]
    first = np.searchsorted(spans[:, 0], wanted[:, 0], side="right") - 1
    last = np.searchsorted(spans[:, 0], wanted[:, 0] + wanted[:, 1] - 1, side="right") - 1
    counts = last - first + 1
    span = np.repeat(first, counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    at, size, target, to = np.repeat(wanted, counts, axis=0).T
    begin = np.maximum(at, spans[span, 0])
    end = np.minimum(at + size, spans[span, 1])
    return np.stack([begin, end - begin, target, to + begin - at, span], axis=1)
