"""Which token shards form a corpus, and which tokens a window of it holds.

A corpus has the shards of one split in the manifest of a token folder, in the order of their names. Window j has the tokens
tokens[j * T : j * T + T + 1], where T is the sequence length: neighboring windows share one token, which is the last label of the first and
the first input of the second. With another stride, window j begins at token j * stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.common import artifact
from pipeline.common.artifact import Manifest
from pipeline.common.errors import UserError
from pipeline.data.load.shard_checksums import Shard
from pipeline.data.load.token_stream import TokenStream


@dataclass(frozen=True)
class Corpus:
    """The token shards of one split of a corpus.

    Attributes:
        name: of the corpus in the run; empty for all corpora of a folder, whose order depends only on the seed.
        totals: of the manifest that lists the shards.
        fingerprint: of the content of the shards.
    """

    name: str
    shards: list[Shard]
    totals: dict[str, Any]
    fingerprint: str

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, split: str, *, name: str = "", corpus: str | None = None) -> Corpus:
        """Select the shards of a split in a folder that stage=tokenize wrote.

        Args:
            corpus: name of the corpus in the manifest; None selects all corpora.

        Raises:
            UserError: the manifest does not mark which files are shards.
        """
        if not any("split" in entry for entry in manifest.files.values()):
            rule, fix = "was written by an earlier version: its manifest names no splits", "remove it and run stage=tokenize again"
            raise UserError.of("data.tokens", folder, rule, fix)
        files = {
            file: entry
            for file, entry in sorted(manifest.files.items())
            if entry.get("split") == split and (corpus is None or entry["corpus"] == corpus)
        }
        content = manifest if corpus is None else replace(manifest, files=files)
        return cls(name, [Shard(folder / file, entry) for file, entry in files.items()], manifest.totals, artifact.fingerprint(content))

    def total(self, count: str) -> int:
        """The sum of a count ("tokens", "text_bytes", "documents") over the shards."""
        return sum(shard.entry[count] for shard in self.shards)

    def permutation_seed(self, seed: int) -> int:
        """The seed of the permutations of this corpus, from the seed of the run."""
        return xxhash.xxh3_64_intdigest(f"{seed} {self.name}".encode()) if self.name else seed


class Windows:
    """Windows of equal length over the tokens of each corpus, regardless of document boundaries.

    Attributes:
        counts: (corpora,) int64, windows per epoch of each corpus.
        length: tokens per window, not counting the last label.
        stride: tokens from the begin of a window to that of the next.
    """

    def __init__(self, stream: TokenStream, corpora: Sequence[Corpus], sequence_length: int, stride: int | None = None) -> None:
        """Compute where each corpus begins in the stream, which has them in this order; the stride is `sequence_length` when None."""
        self._stream, self.length, self.stride = stream, sequence_length, stride or sequence_length
        tokens = np.array([corpus.total("tokens") for corpus in corpora], dtype=np.int64)
        self._starts = np.cumsum(tokens) - tokens
        self.counts = np.maximum((tokens - 1 - sequence_length) // self.stride + 1, 0)

    def read(self, corpora: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Read sequences, which are windows here.

        Args:
            corpora: (n,) or (1,) int64, the corpus of each sequence.
            indices: (n,) int64, the number of each sequence within its corpus.

        Returns:
            (n, sequence_length + 1) in the stream's dtype.
        """
        return self._stream.read(self._starts[corpora] + indices * self.stride, self.length + 1)

    def ranges(self, corpora: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Return where the tokens of sequences are, without a label that is an input of another sequence.

        Args:
            corpora, indices: as of read.

        Returns:
            int64 (3, ranges): for each range of tokens its row in `indices`, its first token in the stream, and its length.
        """
        starts = self._starts[corpora] + indices * self.stride
        return np.stack([np.arange(len(indices)), starts, np.full(len(indices), self.length)])

    def holding(self, corpus: int, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return which sequences of a corpus have the tokens of ranges of the stream, the inverse of `ranges`. Windows do not overlap.

        Args:
            starts: (n,) int64, first token of each range.
            ends: (n,) int64, one more than its last token.

        Returns:
            int64 (3, parts): for each part of a range its row in `starts`, its sequence, and its tokens.
        """
        assert self.stride == self.length
        starts, ends = starts - self._starts[corpus], ends - self._starts[corpus]
        first, stop = starts // self.length, np.minimum(-(-ends // self.length), self.counts[corpus])
        rows, numbers = expanded(np.maximum(stop - first, 0))
        windows = first[rows] + numbers
        begins = windows * self.length
        return np.stack([rows, windows, np.minimum(ends[rows], begins + self.length) - np.maximum(starts[rows], begins)])


def expanded(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return every row as often as its count says, and 0, 1, ... within each row."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
