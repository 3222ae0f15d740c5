"""The shuffle: one sweep of all ranks over their spills, in the order of the shuffle keys.

In a round, every rank writes one shard. The key range of a shard is divided into pieces; for each piece, every rank reads the documents
of its parts that belong to the shards of the round, and sends them to the ranks that write these. A rank thereby reads only its own
parts, each of them once and in the order of its sorted runs, and holds one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.common.mpi import Comm
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import paragraphs, spans
from pipeline.data.shard import span_search
from pipeline.data.shard.shuffle import ShardPlan
from pipeline.data.shard.spilled_documents import SpillPool, contained

PIECE_BYTES = 64 << 20
"""Approximate bytes of text that a rank sends and receives at a time; about five times in memory."""


@dataclass(frozen=True)
class Swept:
    """A document of a shard.

    Attributes:
        row: of row_type.
        text: without repeated paragraphs and spans; all of the original text if nothing else is left.
        repeated: whether nothing is left of the text.
    """

    row: np.void
    meta: bytes
    text: bytes
    repeated: bool


_Piece = tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[bytes, bytes, bool]]]
"""Shuffle keys, numbers, rows, and (metadata, text, repeated) of documents."""


class Sweep:
    """Reads the documents of shards, in rounds. All ranks call `documents` with the same rounds, and read every result to its end.

    Args:
        drop: sorted numbers of the documents of this rank to drop.
    """

    def __init__(self, comm: Comm, pool: SpillPool, drop: np.ndarray, dedup: DedupConfig) -> None:
        self._comm, self._pool, self._drop, self._dedup = comm, pool, drop, dedup
        self._keys = {part: spilled.shuffle_keys() for part, spilled in pool.mine.items()}
        self._flags = {part: paragraphs.Flags(pool.stem(part)) for part in pool.mine} if dedup.paragraphs else {}
        self._cuts = {part: np.load(pool.stem(part).with_suffix(span_search.CUTS)) for part in pool.mine} if dedup.spans else {}

    def documents(self, shards: Sequence[ShardPlan]) -> Iterator[Swept]:
        """Yield the documents, in shuffled order, of this rank's shard of a round, which has one per rank, or fewer. Collective."""
        pieces = max(1, -(-max(shard.text_bytes for shard in shards) // PIECE_BYTES))
        for piece in range(pieces):
            outgoing: list[_Piece | None] = [self._piece(shard, piece, pieces) for shard in shards]
            outgoing += [None] * (self._comm.size - len(shards))
            incoming = [received for received in self._comm.alltoall(outgoing) if received]
            if not incoming:
                continue
            keys, numbers, rows = (np.concatenate([received[column] for received in incoming]) for column in range(3))
            records = [record for received in incoming for record in received[3]]
            for place in np.lexsort((numbers, keys)).tolist():
                yield Swept(rows[place], *records[place])

    def _piece(self, shard: ShardPlan, piece: int, pieces: int) -> _Piece | None:
        """This rank's documents of a piece of a shard, None if there are none."""
        bounds = [shard.first + (shard.stop - shard.first) * number // pieces for number in (piece, piece + 1)]
        chunks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        records: list[tuple[bytes, bytes, bool]] = []
        for part, spilled in self._pool.mine.items():
            keys = self._keys[part]
            for begin, end in zip(spilled.runs[:-1], spilled.runs[1:], strict=True):
                low, high = (begin + np.searchsorted(keys[begin:end], np.array(bounds, dtype=np.uint64))).tolist()
                if low == high:
                    continue
                rows = spilled.rows(low, high)
                numbers = self._pool.starts[part] + rows["number"]
                kept = ~contained(numbers, self._drop) & (numbers != (-1 if shard.without is None else shard.without))
                if shard.only is not None:
                    kept &= numbers == shard.only
                if not kept.any():
                    continue
                chunks.append((keys[low:high][kept], numbers[kept], rows[kept]))
                for is_kept, (meta, text), number in zip(kept.tolist(), spilled.records(low, high), rows["number"].tolist(), strict=True):
                    if is_kept:
                        records.append((meta, *self._without_repeated(part, number, text)))
        if not chunks:
            return None
        keys, numbers, rows = (np.concatenate(arrays) for arrays in zip(*chunks, strict=True))
        return keys, numbers, rows, records

    def _without_repeated(self, part: int, number: int, text: bytes) -> tuple[bytes, bool]:
        """The text of a document without repeated paragraphs and spans, and whether nothing is left; then the original text."""
        shortened = text
        if self._flags:
            shortened = self._flags[part].without(number, text.decode("utf-8"), self._dedup.paragraph_characters).encode("utf-8")
        if self._cuts:
            cuts = self._cuts[part]
            low, high = np.searchsorted(cuts[0], np.array([number, number + 1], dtype=cuts.dtype))
            if low < high:
                shortened = spans.without(shortened.decode("utf-8"), cuts[1:, low:high].T.tolist()).encode("utf-8")
        return (shortened, False) if shortened.strip() else (text, True)
