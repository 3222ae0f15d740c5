"""Which documents are packed into sequence j of a corpus, and where do documents begin and end within sequences?

Best-fit packing: Ding et al. 2024, "Fewer Truncations Improve Language Modeling". For data whose documents must not be truncated, as in
fine-tuning. Unlike windows, packing needs an index: opening reads the length of every document and packs each shard separately. A million
documents take about one second and 20 MB, on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from pipeline.data.load.corpus import expanded
from pipeline.data.load.shard_checksums import Shard
from pipeline.data.load.token_stream import TokenStream


def document_ids(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """The document of each token, counted from 0 within its sequence: (batch, sequence) tokens -> (batch, sequence) int32.

    The end-of-document token belongs to the document that it closes.
    """
    ids = np.zeros(tokens.shape, dtype=np.int32)
    np.cumsum(tokens[:, :-1] == end_of_document, axis=1, out=ids[:, 1:])
    return ids


class BestFit:
    """Sequences of complete documents, padded with end-of-document tokens; has the interface of corpus.Windows.

    A document that is longer than a sequence is split into chunks.

    Attributes:
        counts: (corpora,) int64, sequences per epoch of each corpus.
        tokens: tokens of all sequences, without padding.
        padding: fraction of all tokens that is padding.
    """

    def __init__(self, stream: TokenStream, corpora: Sequence[Sequence[Shard]], sequence_length: int, end_of_document: int) -> None:
        """Pack the corpora shard by shard.

        Args:
            corpora: the shards of each corpus, in the order of the stream.
            sequence_length: tokens per sequence, not counting the last label.
            end_of_document: id of the token that closes every document; it is also the padding.
        """
        self._stream, self._capacity = stream, sequence_length + 1
        self._padding = np.array([end_of_document], dtype=stream.dtype).tobytes()
        packed = [[_pack_shard(shard, self._capacity) for shard in shards] for shards in corpora]
        flat = [pack for packs in packed for pack in packs]
        firsts = np.cumsum([0, *(shard.entry["tokens"] for shard in stream.shards)], dtype=np.int64)
        self._positions = np.concatenate([pack[0] + first for pack, first in zip(flat, firsts[:-1], strict=True)])
        self._lengths = np.concatenate([pack[1] for pack in flat])
        chunks = np.concatenate([pack[2] for pack in flat])
        self._bounds = np.concatenate([[0], np.cumsum(chunks)])  # sequence s holds the chunks [s] to [s + 1]
        self.counts = np.array([sum(len(pack[2]) for pack in packs) for packs in packed], dtype=np.int64)
        self._starts = np.cumsum(self.counts) - self.counts
        self.tokens = int(self._lengths.sum())
        self.padding = 1 - self.tokens / max(len(chunks) * self._capacity, 1)

    def read(self, corpora: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """See Windows."""
        sequences = self._starts[corpora] + indices
        chunks = [np.arange(self._bounds[s], self._bounds[s + 1]) for s in sequences.tolist()]
        chosen = np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int64)
        contents = iter(self._stream.read_ranges(self._positions[chosen], self._lengths[chosen]))
        joined = bytearray()
        for row, numbers in enumerate(chunks, start=1):
            for _ in numbers:
                joined += next(contents)
            missing = row * self._capacity - len(joined) // len(self._padding)
            joined += self._padding * missing
        return np.frombuffer(joined, self._stream.dtype).reshape(len(indices), self._capacity)

    def ranges(self, corpora: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """See Windows."""
        sequences = self._starts[corpora] + indices
        rows, numbers = expanded(self._bounds[sequences + 1] - self._bounds[sequences])
        chunks = self._bounds[sequences][rows] + numbers
        return np.stack([rows, self._positions[chunks], self._lengths[chunks]])

    def holding(self, corpus: int, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """See Windows."""
        order = np.argsort(self._positions)
        positions, lengths = self._positions[order], self._lengths[order]
        first, stop = np.searchsorted(positions, starts, side="right") - 1, np.searchsorted(positions, ends)
        rows, numbers = expanded(np.maximum(stop - first, 0))
        chunks = first[rows] + numbers
        tokens = np.minimum(ends[rows], positions[chunks] + lengths[chunks]) - np.maximum(starts[rows], positions[chunks])
        sequences = np.searchsorted(self._bounds, order[chunks], side="right") - 1 - self._starts[corpus]
        return np.stack([rows, sequences, tokens])


def _pack_shard(shard: Shard, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack one shard.

    Returns:
        Position in the shard and length of each chunk, ordered by sequence, (chunks,) each; and the number of chunks in each sequence.
    """
    entry = shard.entry
    lengths = np.fromfile(shard.path, "<u4", count=entry["documents"], offset=entry["lengths_offset"]).astype(np.int64)
    positions, lengths = split_long(np.cumsum(lengths) - lengths, lengths, capacity)
    sequences = best_fit(lengths, capacity)
    order = np.argsort(sequences, kind="stable")  # within a sequence, the documents keep their order
    return positions[order], lengths[order], np.bincount(sequences)


def split_long(positions: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Split documents that are longer than a sequence into chunks of the sequence's length and a shorter last chunk.

    Args:
        positions: (documents,) first token of each.
        lengths: (documents,) tokens of each, at least 1.
        capacity: tokens per sequence.

    Returns:
        Positions and lengths of the chunks, (chunks,) each.
    """
    counts = -(-lengths // capacity)
    rows, numbers = expanded(counts)
    return positions[rows] + numbers * capacity, np.minimum(lengths[rows] - numbers * capacity, capacity)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing bin packing: longest chunk first, each into the sequence with the least remaining space that is sufficient.

    (chunks,) lengths from 1 to `capacity` tokens -> (chunks,) int64, the sequence of each chunk, numbered from 0.
    """
    chosen = np.empty(len(lengths), dtype=np.int64)
    by_space: dict[int, list[int]] = {}  # remaining space -> the sequences that have it
    spaces: list[int] = []  # the keys of by_space, ascending
    count = 0
    order = np.argsort(-lengths, kind="stable")
    for chunk, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        tightest = bisect_left(spaces, length)
        if tightest == len(spaces):
            sequence, space = count, capacity
            count += 1
        else:
            space = spaces[tightest]
            sequence = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[tightest]
        chosen[chunk] = sequence
        space -= length
        if space:
            if space not in by_space:
                by_space[space] = []
                insort(spaces, space)
            by_space[space].append(sequence)
    return chosen
