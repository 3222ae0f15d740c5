"""Fill-in-the-middle (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle").

Within a sample, a fraction of the documents is split at two random positions into prefix, middle and suffix, and reordered so that the
middle is last. The positions are between tokens. Documents that are truncated by the sample are treated as complete ("context level" in
the paper).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.data.load.permutation import random_words

SENTINELS = 3


@dataclass(frozen=True)
class Infill:
    """The fill-in-the-middle transform.

    Attributes:
        rate: fraction of the documents that are transformed.
        spm_rate: fraction of these in the order suffix, prefix, middle (SPM); the others are prefix, suffix, middle (PSM).
        bos: id of the token that begins every document, before which nothing is moved; None without one.
        seed: of the random numbers; the transform of a sample depends only on the seed and the index of the sample.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    end_of_document: int
    seed: int
    bos: int | None = None

    def apply(self, tokens: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Transform samples, (n, sequence_length + 1); `samples`, (n,) their indices, seed the random numbers.

        Each transformed document grows by three sentinels; tokens beyond the end of the sample are dropped.
        """
        changed = np.empty_like(tokens)
        for row, source, sample in zip(changed, tokens, samples.tolist(), strict=True):
            self._transform(row, source, sample)
        return changed

    def _transform(self, row: np.ndarray, source: np.ndarray, sample: int) -> None:
        """Write the transform of the sample `source` to `row`, document by document."""
        stops = [*np.flatnonzero(source == self.end_of_document).tolist(), len(source)]
        # Four numbers in [0, 1) for each document: whether to transform it, two split positions, and the order.
        words = random_words(self.seed, sample, np.arange(len(stops)), count=4)
        chances = np.stack(words, axis=1).astype(np.float64) / 2.0**64
        first, filled = 0, 0
        for stop, (chance, split_a, split_b, order) in zip(stops, chances.tolist(), strict=True):
            space = len(row) - filled
            document = source[first : min(stop, first + space)]
            if chance < self.rate and len(document) > 0 and space > SENTINELS:
                # Truncate before the split, so that every middle is complete.
                first_of, text = np.split(document[: space - SENTINELS], [int(document[0] == self.bos)])
                text = self._permute_document(text, split_a, split_b, suffix_first=order < self.spm_rate)
                document = np.concatenate([first_of, text])
            closed = np.append(document, source[stop : stop + 1])[:space]
            row[filled : filled + len(closed)] = closed
            first, filled = stop + 1, filled + len(closed)
            if filled == len(row):
                return

    def _permute_document(self, document: np.ndarray, split_a: float, split_b: float, *, suffix_first: bool) -> np.ndarray:
        """A document with its middle last, in PSM or SPM order: (tokens,) -> (tokens + SENTINELS,).

        It is split at split_a and split_b, which are fractions of its length, in any order.
        """
        low, high = sorted(int(fraction * (len(document) + 1)) for fraction in (split_a, split_b))
        prefix, middle, suffix = document[:low], document[low:high], document[high:]
        sentinels = {name: np.array([getattr(self, name)], dtype=document.dtype) for name in ("prefix", "middle", "suffix")}
        if suffix_first:
            return np.concatenate([sentinels["prefix"], sentinels["suffix"], suffix, sentinels["middle"], prefix, middle])
        return np.concatenate([sentinels["prefix"], prefix, sentinels["suffix"], suffix, sentinels["middle"], middle])
