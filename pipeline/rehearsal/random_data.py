"""Random tokens in place of token shards that do not exist yet."""

from __future__ import annotations

from typing import Self

import numpy as np

from pipeline.data.load.objectives.objective import IGNORE, Objective
from pipeline.data.load.objectives.registry import objective_of
from pipeline.data.load.sample_config import SampleConfig


class RandomTokens(Objective):
    """Samples of random tokens with the arrays of the objective of a model: causal, masked, or encoder-decoder.

    Args:
        config: of the run.
    """

    def __init__(self, config: SampleConfig) -> None:
        self._config, self._kind = config, config.objective
        self.decoder_length = config.training.sequence_length if self._kind in ("pairs", "span_corruption", "encoder_decoder") else 0

    @classmethod
    def open_training(cls, config: SampleConfig, share: tuple[int, int] = (0, 1)) -> Self:  # noqa: ARG003 - see Objective
        """See Objective."""
        return cls(config)

    @classmethod
    def open_validation(cls, config: SampleConfig, share: tuple[int, int] = (0, 1)) -> Self | None:  # noqa: ARG003 - see Objective
        """See Objective."""
        return cls(config)

    @staticmethod
    def supports(config: SampleConfig) -> bool:
        """Whether the objective is one whose data is token shards or pairs of texts."""
        return objective_of(config).data_key in ("data.tokens", "data.pairs.train")

    def fingerprint(self, config: SampleConfig, consumed: int) -> str:  # noqa: ARG002 - see Objective
        """See Objective."""
        return "random"

    @property
    def parts(self) -> list[tuple[str, int]]:
        """See Objective: one global batch."""
        return [("", self._config.training.global_batch_size)]

    @property
    def identity(self) -> dict[str, str]:
        """See Objective."""
        return {"validation_data": "random", "tokenizer": ""}

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective."""
        training, model = self._config.training, self._config.model
        rows, length = len(indices), training.sequence_length
        generator = np.random.default_rng(int(indices[0]))

        def tokens(width: int) -> np.ndarray:
            return generator.integers(model.vocab_size, size=(rows, width), dtype=np.int64)

        documents = np.zeros((rows, length), np.int32)
        text = tokens(length + 1)
        if self._kind == "masked":
            targets = np.where(generator.random((rows, length)) < 0.15, text[:, 1:], IGNORE)
            found = {"tokens": text[:, :-1], "targets": targets, "documents": documents}
            if getattr(model, "next_sentence", False):
                found |= {"segments": np.zeros((rows, length), np.int64), "next_sentence": generator.integers(2, size=rows)}
            return found
        if self.decoder_length:
            return {"tokens": tokens(length), "targets": text[:, 1:], "decoder_tokens": text[:, :-1], "documents": documents}
        found = {"tokens": text[:, :-1], "targets": text[:, 1:]}
        return found | ({"documents": documents} if training.document_mask else {})
