"""Which tokens make up sample i of a run? They are a pure function of (seed, i): no index is built, no state is kept.

`Samples.samples` computes them in four steps, the first three in `Samples.sequences`:

1. `BlendSchedule.locate`: sample i -> the corpus, and the number n of the sample within that corpus (n = i with one corpus).
2. Epoch n // count and index n % count, where count is the number of sequences of the corpus. A corpus that is read in longer texts, of
   several sequences in a row, has as many times fewer of them, and the place of a sequence within its text is kept.
3. `permute`: index -> sequence j, by a permutation that is seeded with (seed, corpus, epoch). Validation skips this step.
4. `Windows.read` or `BestFit.read`: sequence j of the corpus -> tokens. Window j is tokens[j * T : j * T + T + 1], T the sequence length.

To resume, a run needs only the number of samples consumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline.common.errors import UserError
from pipeline.data.load.blend_schedule import BlendSchedule
from pipeline.data.load.corpus import Corpus, Windows
from pipeline.data.load.fill_in_the_middle import Infill
from pipeline.data.load.packing import BestFit
from pipeline.data.load.permutation import permute, unpermute
from pipeline.data.load.token_stream import TokenStream


class Dataset(Protocol):
    """The properties of training data that a run depends on.

    Attributes:
        corpora: one, or several with a schedule.
        counts: (corpora,) int64, samples per epoch of each corpus.
        schedule: the corpus of every sample; None with one corpus.
        end_of_document: id of the token that closes every document.
        vocab_size: one more than the largest token id.
    """

    corpora: Sequence[Corpus]
    counts: np.ndarray
    schedule: BlendSchedule | None
    end_of_document: int
    vocab_size: int


class Samples(Dataset):
    """The samples of one corpus, or of a blend of several."""

    def __init__(
        self,
        corpora: Sequence[Corpus],
        stream: TokenStream,
        sequences: Windows | BestFit,
        seed: int | None,
        schedule: BlendSchedule | None = None,
        infill: Infill | None = None,
        runs: np.ndarray | None = None,
    ) -> None:
        """Store the components; nothing is read.

        Args:
            corpora: all tokenized with the same tokenizer.
            seed: of the shuffled order; None reads the sequences in order.
            schedule: the corpus of every sample.
            runs: (corpora,) int64, sequences in a row that are one text of a corpus; one when None.
        """
        assert len(corpora) == 1 or schedule is not None
        self._runs = np.ones(len(corpora), dtype=np.int64) if runs is None else runs
        self.corpora, self.stream, self.schedule = corpora, stream, schedule
        self.counts = sequences.counts // self._runs * self._runs
        #: Tokens of an epoch of packed documents, without padding; None for windows.
        self.packed_tokens: int | None = getattr(sequences, "tokens", None)
        self._sequences, self._shuffled, self._infill = sequences, seed is not None, infill
        self._seeds = np.array([corpus.permutation_seed(seed or 0) & ((1 << 64) - 1) for corpus in corpora], dtype=np.uint64)
        self.end_of_document = int(corpora[0].totals["end_of_document"])
        self.vocab_size = int(corpora[0].totals["vocab_size"])

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """Read samples. Indices beyond an epoch of their corpus continue with the next epoch.

        Args:
            indices: (n,) integers, at least 0.

        Returns:
            (n, sequence_length + 1) in the dtype of the shards (uint16 or uint32): the input is [:, :-1], the labels are [:, 1:].

        Raises:
            UserError: a shard is missing, truncated or corrupt; the message names it.
        """
        indices = np.asarray(indices, dtype=np.int64)
        corpora, _, sequences = self.sequences(indices)
        tokens = self._sequences.read(corpora, sequences)
        return tokens if self._infill is None else self._infill.apply(tokens, indices)

    def begins_text(self, indices: np.ndarray) -> np.ndarray:
        """Return whether the text of each sample is not that of the sample before it, (n,) bool."""
        corpora, ordinals = self._located(indices)
        return ordinals % self._runs[corpora] == 0

    def sequences(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which sequences samples, (n,) int64, are: every sequence of a corpus once in each epoch.

        The corpus and the epoch of each sample, (n,) or (1,) int64 if all are the same, and its sequence in the corpus, (n,) int64.
        """
        corpora, ordinals = self._located(indices)
        runs = self._runs[corpora]
        counts = self.counts[corpora] // runs
        texts, places = np.divmod(ordinals, runs)
        epochs, texts = np.divmod(texts, counts)
        if self._shuffled:
            if len(counts) == 1 and len(epochs) > 0 and epochs.min() == epochs.max():
                epochs = epochs[:1]  # one permutation for all samples
            texts = permute(texts, counts, self._seeds[corpora], epochs)
        return corpora, epochs, texts * runs + places

    def reading(self, corpus: int, sequences: np.ndarray, limit: int) -> np.ndarray:
        """Return which samples below `limit` are these sequences of a corpus, (n,) int64: the inverse of `sequences`.

        int64 (2, n): the row in `sequences`, and the sample.
        """
        run, seed = self._runs[corpus], self._seeds[corpus]
        count = int(self.counts[corpus] // run)
        rows = np.flatnonzero(sequences < count * run)
        texts, places = np.divmod(sequences[rows], run)
        read = limit if self.schedule is None else int(self.schedule.counts(limit)[corpus])
        per_epoch = [np.empty((2, 0), dtype=np.int64)]
        for epoch in range(-(-read // (count * int(run)))):
            indices = unpermute(texts, count, np.array([seed]), epoch) if self._shuffled else texts
            ordinals = (epoch * count + indices) * run + places
            numbers = ordinals if self.schedule is None else self.schedule.numbers(corpus, ordinals)
            early = (numbers >= 0) & (numbers < limit)
            per_epoch.append(np.stack([rows[early], numbers[early]]))
        return np.concatenate(per_epoch, axis=1)

    def ranges(self, indices: np.ndarray) -> np.ndarray:
        """Return where the tokens of samples are in the stream, as Windows.ranges; the rows are those of `indices`."""
        corpora, _, sequences = self.sequences(indices)
        return self._sequences.ranges(corpora, sequences)

    def holding(self, corpus: int, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """As Windows.holding."""
        return self._sequences.holding(corpus, starts, ends)

    def _located(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The corpus of each sample, (n,) or (1,) if all are of one, and its number in the corpus, (n,)."""
        return (np.zeros(1, dtype=np.int64), indices) if self.schedule is None else self.schedule.locate(indices)


def too_short(split: str, where: Path | str, sequence_length: int, tokens: int) -> UserError:
    """The error for a split that is shorter than one sequence."""
    rule = f"needs {sequence_length + 1} tokens, the {split} split of {where} has {tokens}"
    fix = "lower it, or shard more text" + (" or use a larger data.validation_fraction" if split == "validation" else "")
    return UserError.of("training.sequence_length", sequence_length, rule, fix)
