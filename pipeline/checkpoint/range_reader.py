"""Reads runs of elements of the weights of a checkpoint, of any layout, into memory: only the bytes that they need. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.checkpoint import native
from pipeline.checkpoint.contents import Contents, PartRows
from pipeline.checkpoint.data_reader import Counters, DataFiles
from pipeline.checkpoint.native import REMEDY
from pipeline.checkpoint.parts import ITEM_SIZE, NOT_STORED, Box, box_of, overlap, padded
from pipeline.checkpoint.read_chunk import BadBytes, Bytes
from pipeline.checkpoint.read_plan import FilePlan, Integers, ReadSource, plan
from pipeline.common.errors import DamagedCheckpointError, Violation

#: Damages that one rank names; the number of the others is reported.
_NAMED = 8


@dataclass(frozen=True)
class RangeRequest:
    """A run of elements of one kind of a weight.

    Attributes:
        kind: "weight" or a moment, which the checkpoint stores for this weight.
        box: within the full weight.
        start: first element of the flattened box.
        buffer: what the elements go to; its bytes divide into elements of the stored dtype.
    """

    name: str
    kind: str
    box: Box
    start: int
    buffer: Bytes


@dataclass(frozen=True)
class _Part:
    """A stored run that has elements of a request: its row, and (stretches, 3) of element of the part, of the request, and count."""

    row: np.void
    stretches: Integers


class RangeReader:
    """Reads runs of elements of the weights of a checkpoint.

    Attributes:
        tensors: name of a weight -> its entry.
    """

    def __init__(self, folder: Path, contents: Contents) -> None:
        self.tensors, self.counters = contents.index.tensors, Counters()
        self._folder, self._kinds, self._names = folder, contents.index.kinds, [file.name for file in contents.index.files]
        self._rows = PartRows(folder, contents, self.counters)
        self._files = DataFiles(folder, contents.index.files, self.counters)

    def read(self, requests: Sequence[RangeRequest]) -> None:
        """Read runs into their buffers; each file is opened once.

        Raises:
            DamagedCheckpointError: bytes are missing or damaged; with the weight, kind, elements and file of each.
        """
        sources, stored = self._sources(requests)
        plans = plan(sources)
        self.counters.wanted += sum(len(request.buffer) for request in requests)
        damaged = self._files.read(plans, [request.buffer for request in requests])
        if damaged:
            raise DamagedCheckpointError(self._violations(damaged, requests, stored))

    def plan(self, requests: Sequence[RangeRequest]) -> list[FilePlan]:
        """Plan how to read runs."""
        return plan(self._sources(requests)[0])

    def _sources(self, requests: Sequence[RangeRequest]) -> tuple[list[ReadSource], list[np.void]]:
        """Where the requests are stored, and the row of parts.npy of each source.

        Raises:
            DamagedCheckpointError: no part has some of the elements.
        """
        rows = dict(zip((r.name for r in requests), self._rows.read(r.name for r in requests), strict=True))
        sources: list[ReadSource] = []
        stored: list[np.void] = []
        geometry: tuple[object, ...] = ()
        parts: list[_Part] = []
        for number, request in enumerate(requests):
            entry = self.tensors[request.name]
            item = ITEM_SIZE[entry.dtypes[request.kind]]
            count = len(request.buffer) // item
            if geometry != (request.name, request.box, request.start, count):  # else those of the kind before
                geometry = (request.name, request.box, request.start, count)
                parts = list(_parts(rows[request.name], request.box, request.start, count))
                self._check_coverage(request, count, parts)
            column = self._kinds.index(request.kind)
            for part in parts:
                if part.row["offset"][column] == NOT_STORED:
                    _, first, length = part.stretches[0].tolist()
                    raise self._lost(request, first, first + length, "are not stored")
                sources.append(_source(part, column, len(stored), number, item, entry.block_bytes))
                stored.append(part.row)
        return sources, stored

    def _check_coverage(self, request: RangeRequest, count: int, parts: list[_Part]) -> None:
        """Refuse a run of which parts do not have every element once."""
        stretches = np.concatenate([np.zeros((0, 3), np.int64), *(part.stretches for part in parts)])
        stretches = stretches[np.argsort(stretches[:, 1], kind="stable")]
        begin, end = stretches[:, 1], stretches[:, 1] + stretches[:, 2]
        expected = np.append(0, end)
        if wrong := np.flatnonzero(np.append(begin, count) != expected).tolist():
            actual, wanted = int(np.append(begin, count)[wrong[0]]), int(expected[wrong[0]])
            reason = "are in no part" if actual > wanted else "are in more than one part"
            raise self._lost(request, min(actual, wanted), max(actual, wanted), reason)

    def _lost(self, request: RangeRequest, first: int, last: int, reason: str) -> DamagedCheckpointError:
        """The error that elements of a request cannot be found."""
        elements = _text(request.name, request.box, request.start + first, request.start + last)
        return DamagedCheckpointError([Violation("checkpoint", self._folder, f"{request.kind} of {elements} {reason}", REMEDY)])

    def _violations(self, damaged: list[BadBytes], requests: Sequence[RangeRequest], stored: list[np.void]) -> list[Violation]:
        """One violation for each damage, which names what is lost; a single one if the checkpoint is gone."""
        if not self._folder.is_dir():
            return list(native.unreadable(self._folder, self._folder, "").violations)
        violations = []
        for damage in damaged:
            request, row = requests[damage.source.target], stored[damage.source.number]
            item = ITEM_SIZE[self.tensors[request.name].dtypes[request.kind]]
            first, last = (int(row["start"]) + byte // item for byte in (damage.first, damage.last + item - 1))
            elements = _text(request.name, box_of(row, len(request.box)), first, last)
            rule = f"{damage.reason}: {request.kind} of {elements}"
            violations.append(Violation("checkpoint", self._folder / self._names[damage.source.file], rule, REMEDY))
        violations = list(dict.fromkeys(violations))
        if (more := len(violations) - _NAMED) > 0:
            violations[_NAMED:] = [Violation("checkpoint", self._folder, f"{more} more ranges of elements cannot be read", REMEDY)]
        return violations


def _text(name: str, box: Box, first: int, last: int) -> str:
    """Elements of a weight, for messages."""
    return f"{name}[{', '.join(f'{begin}:{end}' for begin, end in box)}], elements {first}:{last}"


def _parts(rows: np.ndarray, box: Box, start: int, count: int) -> Iterator[_Part]:
    """The stored runs that have elements of a run of a weight."""
    own_start, own_stop = (np.array(corner) for corner in padded(box))
    low, high = np.maximum(rows["box_start"], own_start), np.minimum(rows["box_stop"], own_stop)
    touched = (low < high).all(1) & (rows["count"] > 0)
    # The elements of both boxes are between two corners, in the order of each box.
    begin = rows["start"].astype(np.int64)
    bounds = (
        (rows["box_start"], rows["box_stop"], begin, begin + rows["count"].astype(np.int64)),
        (own_start, own_stop, start, start + count),
    )
    for box_start, box_stop, first, last in bounds:
        touched &= (_position(low, box_start, box_stop) < last) & (_position(high - 1, box_start, box_stop) >= first)
    for row in rows[touched]:
        stretches = np.stack(overlap(box_of(row, len(box)), (int(row["start"]), int(row["count"])), box, (start, count)), axis=1)
        if len(stretches):
            yield _Part(row, stretches)


def _position(corner: Integers, start: Integers, stop: Integers) -> Integers:
    """The positions of elements in flattened boxes of three dims."""
    sizes, offsets = stop - start, corner - start
    positions: Integers = (offsets[..., 0] * sizes[..., 1] + offsets[..., 1]) * sizes[..., 2] + offsets[..., 2]
    return positions


def _source(part: _Part, column: int, number: int, target: int, item: int, block: int) -> ReadSource:
    """The bytes of one kind of a part."""
    row = part.row
    return ReadSource(
        number=number,
        file=int(row["file"]),
        offset=int(row["offset"][column]),
        size=int(row["count"]) * item,
        block=block,
        before=int(row["start"]) * item % block,
        digest=int(row["block"][column]),
        target=target,
        stretches=part.stretches * item,
    )
