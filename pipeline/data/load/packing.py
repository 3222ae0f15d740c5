"""Best-fit packing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"): sequences of whole documents.

For data whose documents must not be cut, as in fine-tuning. Unlike windows it needs an index: opening reads the length of every document
and packs each shard by itself, about a second and 20 MB for a million documents, on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from pipeline.data.load.stream import TokenStream
from pipeline.data.load.token_shards import Shard


class BestFit:
    """Sequences of whole documents, padded with end-of-document tokens. A document longer than a sequence is cut into several.

    Attributes:
        counts: (corpora,) int64, sequences of each corpus: an epoch.
        padding: share of all tokens that is padding.
    """

    def __init__(self, stream: TokenStream, corpora: Sequence[Sequence[Shard]], sequence_length: int, end_of_document: int) -> None:
        """Pack the corpora, which lie one after the other in a stream, shard by shard."""
        self._stream, self._capacity = stream, sequence_length + 1
        self._padding = np.array([end_of_document], dtype=stream.dtype).tobytes()
        packed = [[_pack_shard(shard, self._capacity) for shard in shards] for shards in corpora]
        flat = [pack for packs in packed for pack in packs]
        firsts = np.cumsum([0, *(shard.entry["tokens"] for shard in stream.shards)], dtype=np.int64)
        self._positions = np.concatenate([pack[0] + first for pack, first in zip(flat, firsts[:-1], strict=True)])
        self._lengths = np.concatenate([pack[1] for pack in flat])
        pieces = np.concatenate([pack[2] for pack in flat])
        self._bounds = np.concatenate([[0], np.cumsum(pieces)])  # the pieces of sequence s are [s] to [s + 1]
        self.counts = np.array([sum(len(pack[2]) for pack in packs) for packs in packed], dtype=np.int64)
        self._starts = np.cumsum(self.counts) - self.counts
        self.padding = 1 - float(self._lengths.sum()) / max(len(pieces) * self._capacity, 1)

    def read(self, corpora: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Sequences by corpus and place, (n,) each; (n, sequence_length + 1) in the stream's dtype."""
        sequences = self._starts[corpora] + places
        pieces = [np.arange(self._bounds[s], self._bounds[s + 1]) for s in sequences.tolist()]
        chosen = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
        runs = iter(self._stream.runs(self._positions[chosen], self._lengths[chosen]))
        joined = bytearray()
        for row, numbers in enumerate(pieces, start=1):
            for _ in numbers:
                joined += next(runs)
            missing = row * self._capacity - len(joined) // len(self._padding)
            joined += self._padding * missing
        return np.frombuffer(joined, self._stream.dtype).reshape(len(places), self._capacity)


def _pack_shard(shard: Shard, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pieces of a shard, sequence by sequence: position in the shard and length of each, and the pieces of each sequence."""
    entry = shard.entry
    lengths = np.fromfile(shard.path, "<u4", count=entry["documents"], offset=entry["lengths_offset"]).astype(np.int64)
    positions, lengths = split_long(np.cumsum(lengths) - lengths, lengths, capacity)
    sequences = best_fit(lengths, capacity)
    order = np.argsort(sequences, kind="stable")  # within a sequence the documents keep their order
    return positions[order], lengths[order], np.bincount(sequences)


def split_long(positions: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents that are longer than a sequence into full sequences and a rest.

    Args:
        positions: (documents,) where each begins.
        lengths: (documents,) tokens of each, at least 1.
        capacity: tokens of a sequence.

    Returns:
        Positions and lengths of the pieces.
    """
    pieces = -(-lengths // capacity)
    numbers = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # 0, 1, ... within each document
    starts = numbers * capacity
    return np.repeat(positions, pieces) + starts, np.minimum(np.repeat(lengths, pieces) - starts, capacity)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing: the longest piece first, each into the fullest sequence that still has room for it.

    Args:
        lengths: (pieces,) from 1 to capacity.
        capacity: tokens of a sequence.

    Returns:
        (pieces,) int64, the sequence of each piece; sequences count from 0.
    """
    chosen = np.empty(len(lengths), dtype=np.int64)
    with_room: dict[int, list[int]] = {}  # room left -> the sequences that have it
    rooms: list[int] = []  # its keys, ascending
    count = 0
    order = np.argsort(-lengths, kind="stable")
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        tightest = bisect_left(rooms, length)
        if tightest == len(rooms):
            sequence, room = count, capacity
            count += 1
        else:
            room = rooms[tightest]
            sequence = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[tightest]
        chosen[piece] = sequence
        room -= length
        if room:
            if room not in with_room:
                with_room[room] = []
                insort(rooms, room)
            with_room[room].append(sequence)
    return chosen
