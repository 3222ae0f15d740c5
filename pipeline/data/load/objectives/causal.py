"""Causal language modeling: predict the next token from all tokens before it.

Of the goldfish loss (Hans et al. 2024, https://arxiv.org/abs/2406.10209) some targets have no loss, so that no text can be recited.
Whether a target is dropped is a hash of the `context` tokens before it in its document: all copies of a text lose the same targets,
wherever a copy is in a sample, in which run, on which rank. What has fewer tokens before it cannot be hashed:

- at the begin of a document, the first `context` targets are kept, in every copy;
- at the begin of a sample, up to `context` targets are dropped if their document may have begun before the sample: they may be targets that
  are dropped elsewhere.

The target after an end-of-document token is the first token of the next document.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.data.load.objectives.objective import IGNORE, TokenShardObjective
from pipeline.data.load.packing import document_ids
from pipeline.data.load.permutation import random_words
from pipeline.data.load.samples import Samples
from pipeline.data.load.teacher import TeacherAnswers
from pipeline.data.load.token_stream import TokenStream
from pipeline.data.load.validation_split import ValidationSamples

#: Odd factor of the polynomial over the tokens of a context, modulo 2**64.
_FACTOR = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64
#: Seeds of the numbers that stand for tokens, and of the last hash; the same in all runs.
_TOKENS, _CONTEXTS = 0, 1


def dropped(text: np.ndarray, end_of_document: int, every: int, context: int) -> np.ndarray:
    """Return which targets have no loss.

    Args:
        text: (n, length + 1) tokens; the target of a position is the next token.
        every: one of so many targets is dropped on average (k in the paper).
        context: number of tokens that are hashed (h in the paper).

    Returns:
        bool (n, length).
    """
    inputs = text[:, :-1]
    rows, length = inputs.shape
    last_end = np.maximum.accumulate(np.where(inputs == end_of_document, np.arange(length), -1), axis=1)
    is_known = np.arange(length) - last_end >= context
    words = random_words(_TOKENS, inputs.ravel(), count=1)[0].reshape(rows, length)
    sums = np.zeros_like(words)
    for back in range(min(context, length)):
        sums[:, back:] += words[:, : length - back] * np.uint64(pow(_FACTOR, back, _MODULUS))
    hashes = random_words(_CONTEXTS, sums.ravel(), count=1)[0].reshape(rows, length)
    return np.where(is_known, hashes < np.uint64(_MODULUS // every), last_end < 0)


class Causal(TokenShardObjective):
    """The target of each position is the next token; with training.goldfish_k, some targets of the training data have no loss."""

    settings: ClassVar[tuple[str, ...]] = (*TokenShardObjective.settings, "training.goldfish_k", "training.goldfish_context")

    #: Arguments of `dropped`; None for a loss of all targets.
    _goldfish: tuple[int, int] | None = None
    #: What a teacher predicts; None without one.
    teacher: TeacherAnswers | None = None

    def __init__(self, samples: Samples, *, document_mask: bool = False, padded: bool = False) -> None:
        """Use samples of sequence_length + 1 tokens.

        Args:
            document_mask: return document numbers, for attention within documents.
            padded: some documents are followed by end-of-document tokens, which get no targets: packed ones, or some are removed.
        """
        self.samples, self._document_mask, self._padded = samples, document_mask, padded

    @staticmethod
    def every_position_counts(config: RunConfig) -> bool:
        """See Objective: packed and removed documents are padded, and the goldfish loss drops targets."""
        return config.data.packing == "windows" and config.data.remove is None and not config.training.goldfish_k

    @staticmethod
    def sample_settings(config: RunConfig) -> dict[str, Any]:
        """See TokenShardObjective."""
        training = config.training
        return {"goldfish": (training.goldfish_k, training.goldfish_context)} if training.goldfish_k else {}

    @staticmethod
    def text_length(config: RunConfig) -> int:
        """See TokenShardObjective."""
        return config.training.sequence_length

    @classmethod
    def of(cls, config: RunConfig, samples: Samples) -> Self:
        """See TokenShardObjective."""
        padded = config.data.packing == "best_fit" or config.data.remove is not None
        return cls(samples, document_mask=config.training.document_mask, padded=padded)

    @classmethod
    def open_training(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self:
        """See Objective. A validation counts all targets, and has no teacher."""
        objective, training = super().open_training(config, share), config.training
        objective._goldfish = (training.goldfish_k, training.goldfish_context) if training.goldfish_k else None
        if config.data.teacher is not None:
            objective.teacher = TeacherAnswers(Path(config.data.teacher), config.data.verify, share)
        return objective

    @property
    def streams(self) -> list[TokenStream]:
        """See Objective."""
        return [*super().streams, *([] if self.teacher is None else [self.teacher.stream])]

    def bytes_per_target(self, indices: np.ndarray) -> np.ndarray | None:
        """See Objective."""
        return self.samples.bytes_per_token(indices) if isinstance(self.samples, ValidationSamples) else None

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens and targets; documents under a document mask; what a teacher predicts."""
        text = self.samples.samples(indices)
        arrays = {"tokens": text[:, :-1], "targets": text[:, 1:]}
        if self._padded:
            end = self.samples.end_of_document
            padding = (arrays["tokens"] == end) & (arrays["targets"] == end)
            arrays["targets"] = np.where(padding, np.int32(IGNORE), arrays["targets"].astype(np.int32))
        if self._goldfish is not None:
            without = dropped(text, self.samples.end_of_document, *self._goldfish)
            arrays["targets"] = np.where(without, np.int32(IGNORE), arrays["targets"].astype(np.int32))
        if self._document_mask:
            arrays["documents"] = document_ids(arrays["tokens"], self.samples.end_of_document)
        return arrays if self.teacher is None else {**arrays, **self.teacher.arrays(indices)}

    def joined(self, arrays: dict[str, np.ndarray], indices: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """See Objective. A document goes on in the next sample if both are of one text."""
        joined = super().joined(arrays, indices, length)
        if "documents" in joined:
            begins = self.samples.begins_text(indices).reshape(len(joined["tokens"]), -1)
            texts = np.repeat(begins.cumsum(axis=1, dtype=np.int32), arrays["tokens"].shape[1], axis=1)
            joined["documents"] = document_ids(joined["tokens"], self.samples.end_of_document) + texts
        return joined


class Sliding(Causal):
    """Windows that begin stage.stride tokens after one another; for evaluation.

    Only the last stage.stride tokens of a window are targets, so that each has a context of at least sequence_length - stride tokens; all
    tokens of the first window are.
    """

    samples: ValidationSamples

    @staticmethod
    def validation_stride(config: RunConfig) -> int | None:
        """See TokenShardObjective."""
        assert isinstance(config.stage, Evaluate)
        return config.stage.stride

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: as Causal, with the targets of a window's last tokens."""
        arrays = super().arrays(indices)
        targets = arrays["targets"].astype(np.int32)
        targets[np.asarray(indices) > 0, : targets.shape[1] - self.samples.stride] = IGNORE
        return {**arrays, "targets": targets}
