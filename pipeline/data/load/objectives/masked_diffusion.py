"""Masked diffusion language modeling (Sahoo et al. 2024, https://arxiv.org/abs/2406.07524; LLaDA, Nie et al. 2025, section 2.2).

For every sequence a masking rate t is drawn uniformly from (training.diffusion_eps, 1], and each of its text tokens becomes the mask token
with probability t. The model predicts the masked tokens from all others. Their cross-entropy is divided by t and summed, and the sum is
divided by the number of text tokens: in the mean over rates and masks an upper bound of the negative log-likelihood of a token (LLaDA,
https://arxiv.org/abs/2502.09992, equations 3 and 4), up to rates below training.diffusion_eps.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.masked import Masked
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.permutation import random_words
from pipeline.data.load.samples import Samples


class MaskedDiffusion(Masked):
    """The sequences of Masked without next sentences. Rate and masks follow from seed and sample number, and differ between epochs."""

    settings: ClassVar[tuple[str, ...]] = (*Masked.settings, "training.diffusion_eps")

    _eps: float

    @classmethod
    def of(cls, config: RunConfig, samples: Samples) -> Self:
        """See TokenShardObjective."""
        objective = super().of(config, samples)
        objective._eps = config.training.diffusion_eps
        return objective

    @staticmethod
    def sample_settings(config: RunConfig) -> dict[str, Any]:
        """See TokenShardObjective."""
        return {**Masked.sample_settings(config), "masked_diffusion": config.training.diffusion_eps}

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens, targets and loss_weights; documents with padding or a document mask."""
        indices = np.asarray(indices, dtype=np.int64)
        arrays = self.unmasked(indices)
        tokens = arrays["tokens"]
        rows, length = tokens.shape
        # Positions are 0 to length - 1, and the number after them is that of the rate.
        words = random_words(self._seed, np.repeat(indices, length + 1), np.tile(np.arange(length + 1), rows), count=1)[0]
        uniform = ((words >> np.uint64(11)).astype(np.float64) / 2.0**53).reshape(rows, length + 1)  # in [0, 1)
        rates = 1 - (1 - self._eps) * uniform[:, -1:]
        is_text = self._is_ordinary[tokens]
        if "documents" in arrays:
            is_text &= arrays["documents"] >= 0
        masked = is_text & (uniform[:, :-1] < rates)
        arrays["tokens"] = np.where(masked, tokens.dtype.type(self._vocabulary.mask), tokens)
        arrays["targets"] = np.where(masked, tokens.astype(np.int32), np.int32(IGNORE))
        arrays["loss_weights"] = np.where(is_text, 1 / rates, 0).astype(np.float32)
        return arrays
