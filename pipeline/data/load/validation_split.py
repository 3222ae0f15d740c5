"""Which windows of a validation split are read? All of them in order, or a sample of all corpora in proportion to their tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from pipeline.common.texts import count
from pipeline.data.load.corpus import Corpus, Windows
from pipeline.data.load.permutation import permute, random_words
from pipeline.data.load.samples import Samples
from pipeline.data.load.token_stream import TokenStream

#: Seed of every sample: runs with another training.seed are compared on the same windows.
_SEED = 0


class ValidationSamples(Samples):
    """The windows of a validation split, in order.

    Attributes:
        parts: (corpus, windows) in the order of the split; a window belongs to the corpus in which it begins.
        stride: tokens from the begin of a window to that of the next.
    """

    def __init__(self, corpus: Corpus, stream: TokenStream, windows: Windows, names: Sequence[str]) -> None:
        """Store the components, `names` being the corpora of the shards; nothing is read."""
        super().__init__([corpus], stream, windows, None)
        tokens, text_bytes = ([shard.entry[count] for shard in corpus.shards] for count in ("tokens", "text_bytes"))
        self._ends, self._bytes = np.cumsum([0, *tokens]), np.cumsum([0, *text_bytes])
        self._length, self.stride = windows.length, windows.stride
        bounds = np.minimum(-(-self._ends // self.stride), self.counts[0])
        shards = groupby(zip(names, np.diff(bounds).tolist(), strict=True), key=lambda shard: shard[0])
        parts = [(name, sum(count for _, count in group)) for name, group in shards]
        self.parts = [(name, count) for name, count in parts if count]

    def bytes_per_token(self, indices: np.ndarray) -> np.ndarray:
        """UTF-8 bytes of text per token of windows, (n,) float64: the mean over the shards of a window, weighted by its tokens."""
        starts = np.asarray(indices, dtype=np.int64) * self.stride + 1  # the first target
        first, last = (np.interp(places, self._ends, self._bytes) for places in (starts, starts + self._length))
        return (last - first) / self._length


def choose(counts: Sequence[int], size: int | None) -> np.ndarray:
    """Choose samples of a split that consists of parts, with equal probability and from each part in proportion to its samples.

    The number from a part is its share of `size`, rounded up or down (systematic sampling with a random start of the samples in an order
    that is random within each part: Cochran 1977, "Sampling Techniques", section 8). The result depends on the arguments only.

    Args:
        counts: samples of each part.
        size: number of samples to choose; None, or as many as there are, chooses all.

    Returns:
        (size,) int64, distinct sample numbers, ascending.
    """
    total = sum(counts)
    if size is None or size >= total:
        return np.arange(total)
    (word,) = random_words(_SEED, total, count=1)
    places = (np.arange(size) * total + int(word[0] % np.uint64(total))) // size
    ends = np.cumsum(counts)
    parts = np.searchsorted(ends, places, side="right")
    sizes = np.asarray(counts, dtype=np.int64)[parts]
    starts = ends[parts] - sizes
    return np.sort(starts + permute(places - starts, sizes, _SEED, parts))


log = logging.getLogger("pipeline")

#: Documents from which on there is no warning. The mean loss of fewer depends on which ones they are.
ENOUGH_DOCUMENTS = 30


def warn_of_few_documents(documents: int, fix: str) -> None:
    """Warn of a split with too few documents; without any there is no validation."""
    if 0 < documents < ENOUGH_DOCUMENTS:
        log.warning("the validation split has %s: its loss says little about other texts; %s", count(documents, "document"), fix)
