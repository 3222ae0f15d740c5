"""Pseudo-log-likelihoods of a masked language model: each token is masked alone (Salazar et al. 2020, https://arxiv.org/abs/1910.14659)."""

from __future__ import annotations

import copy

import numpy as np

from pipeline.data.load.objectives.masked import Masked, Vocabulary
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.sample_config import SampleConfig
from pipeline.data.load.samples import Samples
from pipeline.data.load.validation_split import choose


class PseudoLikelihood(Masked):
    """The sequences of Masked, each once for every position, with that position masked; for evaluation.

    Sample i is position i % sequence_length of sequence i // sequence_length. At a special token, it has no target.
    """

    def __init__(self, samples: Samples, vocabulary: Vocabulary, config: SampleConfig) -> None:
        """See Masked."""
        super().__init__(samples, vocabulary, config)
        self.samples = copy.copy(samples)
        self.samples.counts = samples.counts * self._length

    @property
    def parts(self) -> list[tuple[str, int]]:
        """See Objective."""
        return [(name, count * self._length) for name, count in super().parts]

    def validation_sample(self, size: int | None) -> np.ndarray:
        """See Objective: all positions of the sequences that Masked would read."""
        sequences = choose([count for _, count in super().parts], None if size is None else size // self._length)
        return (sequences[:, None] * self._length + np.arange(self._length)).ravel()

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: as Masked, with one target in each row at most."""
        sequences, positions = np.divmod(np.asarray(indices, dtype=np.int64), self._length)
        distinct, where = np.unique(sequences, return_inverse=True)
        arrays = {name: array[where] for name, array in self.unmasked(distinct).items()}
        rows, targets = np.arange(len(positions)), np.full(arrays["tokens"].shape, IGNORE, dtype=np.int32)
        original = arrays["tokens"][rows, positions]
        counted = self._is_ordinary[original]
        if "documents" in arrays:
            counted &= arrays["documents"][rows, positions] >= 0
        targets[rows[counted], positions[counted]] = original[counted]
        arrays["tokens"][rows[counted], positions[counted]] = self._vocabulary.mask
        return {**arrays, "targets": targets}
