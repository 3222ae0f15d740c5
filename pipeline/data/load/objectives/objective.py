"""The interface of a training objective: which samples a model reads, and what it predicts.

An objective owns what follows from this choice: how its data is opened, the arrays of a batch, whether every position of a batch has a
target, and the fingerprint that a resumed run must match. registry.py lists the objectives by name; their configuration rules are in
config/rules/objectives.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import xxhash

from pipeline.config.data import DECODER_STARTS
from pipeline.config.schema import RunConfig
from pipeline.data.load import blend
from pipeline.data.load.samples import Dataset, Samples
from pipeline.data.load.special_tokens import SpecialTokens
from pipeline.data.load.token_stream import TokenStream
from pipeline.data.load.validation_split import ValidationSamples, choose

#: The target of a position without a target, equal to layers/loss.py IGNORE, which loads torch.
IGNORE = -100


class Objective(ABC):
    """Builds a model's inputs and targets from samples of text.

    The arrays of sample i depend on (seed, i) only: not on the ranks, the batch or earlier calls.

    Attributes:
        settings: configuration keys that determine a sample besides the training group's seed and sequence_length; a resumed run that
            differs is refused with the names of those that differ.
        loss_settings: keys of the training group that its loss depends on besides the samples.
        data_key: the configuration key that names the data.
        sums: number of the sums over sequences that the model measures besides the loss (Stack.measured); 0 for none.
        decoder_length: tokens of the decoder's input, 0 without a decoder.
    """

    settings: ClassVar[tuple[str, ...]] = ()
    loss_settings: ClassVar[tuple[str, ...]] = ()
    data_key: ClassVar[str] = "data.tokens"

    samples: Dataset
    sums: int = 0
    decoder_length: int = 0

    @staticmethod
    def every_position_counts(config: RunConfig) -> bool:  # noqa: ARG004
        """Whether every position of a batch has a target, so that the mean over micro-batches is the mean over targets."""
        return False

    @classmethod
    @abstractmethod
    def open_training(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self:
        """Open the training data of a run.

        Args:
            share: (rank, ranks) of the job, which share work that is the same for all, such as checksums.

        Raises:
            UserError: the data or the tokenizer is missing, damaged, or lacks what the objective needs.
        """

    @classmethod
    @abstractmethod
    def open_validation(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self | None:
        """Open the validation data; None if it holds no sample. Arguments and errors as in open_training."""

    @classmethod
    def open_validation_corpora(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> dict[str, Self | None]:  # noqa: ARG003
        """Open the validation data of each corpus by name, None for one without a sample; empty if the data is not divided into corpora."""
        return {}

    @abstractmethod
    def fingerprint(self, config: RunConfig, consumed: int) -> str:
        """A short text that is equal for two runs if their first `consumed` samples are equal."""

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Corpus and number of samples of each part of a validation split, in the order of its samples; "" without corpora."""
        return [("", int(self.samples.counts[0]))]

    @property
    def documents(self) -> int:
        """Number of documents or examples of a validation split."""
        return int(self.samples.counts[0])

    @property
    def streams(self) -> list[TokenStream]:
        """The streams of shards that are read."""
        return [stream for stream in [getattr(self.samples, "stream", None)] if stream is not None]

    @property
    def identity(self) -> dict[str, str]:
        """What a loss of this data is of, for metrics.jsonl: "validation_data", text or examples whatever their tokens; "tokenizer"."""
        corpora = self.samples.corpora
        entries = [shard.entry for corpus in corpora for shard in corpus.shards]
        text: list[Any] = [[entry.get(name) for name in ("documents", "text_bytes", "content")] for entry in entries]
        data = xxhash.xxh3_64_hexdigest(json.dumps(text or [corpus.fingerprint for corpus in corpora]).encode())
        return {"validation_data": data, "tokenizer": str(corpora[0].totals.get("tokenizer", ""))}

    def validation_sample(self, size: int | None) -> np.ndarray:
        """The samples of a validation split that a validation reads; arguments and result as in validation_split.choose."""
        return choose([count for _, count in self.parts], size)

    def bytes_per_target(self, indices: np.ndarray) -> np.ndarray | None:  # noqa: ARG002
        """UTF-8 bytes of text per target of samples of a validation split, (n,); None if the loss does not cover all of the text."""
        return None

    @abstractmethod
    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs and targets of samples, by their numbers (n,).

        "tokens" and the other entries of a Batch (layers/batch.py) that this objective has, n rows each, in any integer type.
        """

    def joined(self, arrays: dict[str, np.ndarray], indices: np.ndarray, length: int) -> dict[str, np.ndarray]:  # noqa: ARG002
        """Join the arrays of samples in a row, (n,) `indices`, to sequences of several: the same entries, with rows of `length` tokens."""
        return {name: array.reshape(-1, length, *array.shape[2:]) for name, array in arrays.items()}

    def measures(self, sums: np.ndarray) -> dict[str, float]:  # noqa: ARG002
        """What a validation reports besides the loss, by name; `sums` are fp64 (self.sums,), over all of its sequences."""
        return {}


class TokenShardObjective(Objective):
    """An objective whose samples come from token shards, blended and packed as data.blend and data.packing specify."""

    settings: ClassVar[tuple[str, ...]] = ("data.blend", "data.phases", "data.packing", "data.infill")

    samples: Samples

    @staticmethod
    @abstractmethod
    def text_length(config: RunConfig) -> int:
        """Tokens of text per sample; samples have one token more, the last label."""

    @staticmethod
    def validation_stride(config: RunConfig) -> int | None:  # noqa: ARG004
        """Tokens from the begin of a sample of validation data to that of the next; its tokens of text when None."""
        return None

    @classmethod
    @abstractmethod
    def of(cls, config: RunConfig, samples: Samples) -> Self:
        """The objective over these samples; errors as in open_training."""

    @staticmethod
    def sample_settings(config: RunConfig) -> dict[str, Any]:  # noqa: ARG004
        """Settings of this objective that determine a sample, for the fingerprint."""
        return {}

    @classmethod
    def open_training(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self:
        """See Objective."""
        sequence, sample = config.training.sequence_length, config.training.sample_length
        return cls.of(config, blend.open_training(config, share, cls.text_length(config) * sample // sequence))

    @classmethod
    def open_validation(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self | None:
        """See Objective."""
        samples = blend.open_validation(config, share, cls.text_length(config), cls.validation_stride(config))
        return cls.of(config, samples) if samples is not None else None

    @classmethod
    def open_validation_corpora(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> dict[str, Self | None]:
        """See Objective."""
        corpora = blend.open_validation_corpora(config, share, cls.text_length(config), cls.validation_stride(config))
        return {name: None if samples is None else cls.of(config, samples) for name, samples in corpora.items()}

    @property
    def parts(self) -> list[tuple[str, int]]:
        """See Objective."""
        return self.samples.parts if isinstance(self.samples, ValidationSamples) else super().parts

    @property
    def documents(self) -> int:
        """See Objective."""
        return sum(corpus.total("documents") for corpus in self.samples.corpora)

    def fingerprint(self, config: RunConfig, consumed: int) -> str:
        """See Objective."""
        return blend.fingerprint(config, self.samples, consumed, self.sample_settings(config))


def special_tokens(config: RunConfig, samples: Dataset) -> SpecialTokens:
    """The special tokens of the run's tokenizer, with which the samples were tokenized; errors as in SpecialTokens."""
    return SpecialTokens(Path(config.tokenizer.path), samples.corpora[0].totals["tokenizer"])


def decoder_start(named: str | None, special: SpecialTokens) -> int:
    """The id of the token that a decoder reads first, which is also its padding.

    Raises:
        UserError: as SpecialTokens.find.
    """
    return special.find({"data.decoder_start": (named, DECODER_STARTS)})[0]
