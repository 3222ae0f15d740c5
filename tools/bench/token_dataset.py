"""Token shards as a data set of windows, for benchmarks and tests that read them without a run's configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.common import artifact
from pipeline.data.load.corpus import Corpus, Windows
from pipeline.data.load.samples import Samples, too_short
from pipeline.data.load.token_stream import TokenStream


class TokenDataset(Samples):
    """The windows of one split of a folder that stage=tokenize wrote. All its corpora form one, so an epoch holds every window once.

    Attributes:
        sequence_length: tokens per sample, not counting the last label.
        tokens: length of the split's stream.
        windows: samples per epoch.
    """

    def __init__(self, folder: Path, split: str, sequence_length: int, seed: int) -> None:
        """Open the split; no token is read.

        Args:
            folder: of the token shards.
            split: train (shuffled differently in every epoch) or validation (in order).
            sequence_length: tokens per sample, not counting the last label.
            seed: of the shuffled order.

        Raises:
            UserError: the folder is not finished, a shard is missing or truncated, or the split is shorter than one window.
        """
        assert split in ("train", "validation")
        corpus = Corpus.of(folder, artifact.read(folder, key="data.tokens", stage="tokenize"), split)
        stream = TokenStream(corpus.shards)
        stream.check_sizes()
        super().__init__([corpus], stream, Windows(stream, [corpus], sequence_length), seed if split == "train" else None)
        self.sequence_length, self.tokens, self.windows = sequence_length, stream.tokens, int(self.counts[0])
        if self.windows < 1:
            raise too_short(split, folder, sequence_length, stream.tokens)

    def samples_with_boundaries(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read samples and find the document boundaries in their inputs.

        Returns:
            The result of `samples`, and int32 (documents + 1,) from cumulative_lengths of [:, :-1].
        """
        tokens = self.samples(indices)
        return tokens, cumulative_lengths(tokens[:, :-1], self.end_of_document)


def cumulative_lengths(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """The boundaries of all documents in the flattened batch: `cu_seqlens` of FlashAttention's variable-length kernels.

    Args:
        tokens: (batch, sequence) input tokens. A document that is split over two sequences counts as one in each.

    Returns:
        (documents + 1,) int32: document d of the flattened batch is tokens [d] to [d + 1].
    """
    closes = tokens == end_of_document
    closes[:, -1] = True
    # End tokens are rare: find the words of eight tokens that contain one first, where the size is a multiple of eight.
    flat = closes.reshape(-1)
    if flat.size % 8 == 0:
        words = np.flatnonzero(flat.view(np.uint64))
        rows, columns = np.nonzero(flat.reshape(-1, 8)[words])
        ends = words[rows] * 8 + columns
    else:
        ends = np.flatnonzero(flat)
    bounds = np.zeros(len(ends) + 1, dtype=np.int32)
    bounds[1:] = ends + 1
    return bounds
