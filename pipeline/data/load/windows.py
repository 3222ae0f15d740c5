"""Which tokens of a corpus does window j hold? tokens[j * T : j * T + T + 1], where T is the sequence length.

Neighboring windows share one token: it is the last label of the first and the first input of the second. With another stride, window j
begins at token j * stride.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.data.load.corpus import Corpus
from pipeline.data.load.token_stream import TokenStream


class Windows:
    """Windows of equal length over the tokens of each corpus, regardless of document boundaries. Implements Sequences.

    Attributes:
        counts: (corpora,) int64, windows per epoch of each corpus.
        length: tokens per window, not counting the last label.
        stride: tokens from the begin of a window to that of the next.
    """

    def __init__(self, stream: TokenStream, corpora: Sequence[Corpus], sequence_length: int, stride: int | None = None) -> None:
        """Compute where each corpus begins in the stream.

        Args:
            stream: the concatenated tokens of the corpora.
            corpora: in the order of the stream.
            sequence_length: tokens per window, not counting the last label.
            stride: tokens from the begin of a window to that of the next; sequence_length when None.
        """
        self._stream, self.length, self.stride = stream, sequence_length, stride or sequence_length
        tokens = np.array([corpus.total("tokens") for corpus in corpora], dtype=np.int64)
        self._starts = np.cumsum(tokens) - tokens
        self.counts = np.maximum((tokens - 1 - sequence_length) // self.stride + 1, 0)

    def read(self, corpora: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Read windows.

        Args:
            corpora: (n,) or (1,) int64, the corpus of each window.
            indices: (n,) int64, the number of each window within its corpus.

        Returns:
            (n, sequence_length + 1) in the stream's dtype.
        """
        return self._stream.read(self._starts[corpora] + indices * self.stride, self.length + 1)
