"""Supervised fine-tuning: predict the answers of prompts and chats (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, section 3.5)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import xxhash

from pipeline.config.schema import RunConfig
from pipeline.data.load.instructions import Instructions, open_files, open_folder
from pipeline.data.load.objectives.objective import IGNORE, Objective
from pipeline.data.load.prompts_and_answers import ExampleReader, PairReader
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.tokenizer import TextEncoder

log = logging.getLogger("pipeline")


class Supervised(Objective):
    """Packed examples. Only tokens of answers are targets; an example attends to nothing but itself, and its positions begin at 0."""

    settings: ClassVar[tuple[str, ...]] = (
        *("data.instructions.pack", "data.instructions.too_long", "data.instructions.tokens", "data.shard_megabytes"),
        *("tokenizer.path", "tokenizer.end_of_document", "tokenizer.chat_template"),
    )
    data_key: ClassVar[str] = "data.instructions.train"

    #: How a line is read.
    reader: type[ExampleReader] = ExampleReader

    samples: Instructions

    def __init__(self, samples: Instructions, length: int) -> None:
        """Use sequences of `length` tokens."""
        self.samples, self._length = samples, length

    @classmethod
    def open_training(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self:
        """See Objective: data.instructions.train, or the shards of data.instructions.tokens, shuffled."""
        seed = config.training.seed
        if config.data.instructions.tokens is None:
            return cls._open(config, config.data.instructions.train, "data.instructions.train", share, seed)
        samples = open_folder(config, "train", share, seed)
        assert samples is not None  # stage=tokenize requires training files
        return cls(samples, config.training.sequence_length)

    @classmethod
    def open_validation(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self | None:
        """See Objective: data.instructions.validation in file order, or those of data.instructions.tokens; None if there are none."""
        paths = config.data.instructions.validation
        if config.data.instructions.tokens is not None:
            samples = open_folder(config, "validation", share, None)
            return None if samples is None else cls(samples, config.training.sequence_length)
        return cls._open(config, paths, "data.instructions.validation", share, None) if paths else None

    @classmethod
    def tokenizer_of(cls, config: RunConfig) -> tuple[TextEncoder, ExampleReader]:
        """Open the tokenizer, and the reader of lines.

        Raises:
            UserError: the folder has no tokenizer, or its chat template cannot be compiled.
        """
        encoder, chosen = TextEncoder.of(config.tokenizer), config.data.instructions
        folder, template, longest = encoder.path.parent, chat_template.of(config.tokenizer), config.training.sequence_length + 1
        end, texts = encoder.end_of_document, encoder.prompts
        return encoder, cls.reader(folder, end, longest, chosen.too_long, template, texts, repair=chosen.repair)

    @classmethod
    def _open(cls, config: RunConfig, paths: list[str], key: str, share: tuple[int, int], seed: int | None) -> Self:
        encoder, reader = cls.tokenizer_of(config)
        length, template = config.training.sequence_length, chat_template.of(config.tokenizer)
        report = Path(config.run_dir) if share[0] == 0 else None
        if template is not None and template.is_dated and report is not None:
            log.warning("the chat template writes the date of today: on another day the same chats have other tokens")
        samples = open_files(
            paths,
            reader,
            encoder,
            key=key,
            length=length,
            pack=config.data.instructions.pack,
            seed=seed,
            limit=config.data.quarantine_limit,
            megabytes=config.data.shard_megabytes,
            report=report,
        )
        return cls(samples, length)

    @property
    def documents(self) -> int:
        """See Objective: examples, of which a sequence may have several."""
        return self.samples.examples

    def fingerprint(self, config: RunConfig, consumed: int) -> str:  # noqa: ARG002
        """See Objective: the sequences, the tokenizer, and packing."""
        corpus = self.samples.corpora[0]
        content = (corpus.fingerprint, corpus.totals["tokenizer"], corpus.totals["end_of_document"], config.data.instructions.pack)
        return xxhash.xxh3_64_hexdigest(repr(content).encode())

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens, targets, documents, and positions within each example."""
        shape = (len(indices), self._length)
        tokens, targets = np.full(shape, self.samples.end_of_document, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        documents, positions = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.int64)
        for row, examples in enumerate(self.samples.sequences(indices)):
            start = 0
            for number, example in enumerate(examples):
                part = slice(start, start + len(example.tokens) - 1)
                tokens[row, part] = example.tokens[:-1]
                targets[row, part] = np.where(example.is_answer[1:], example.tokens[1:], IGNORE)
                documents[row, part], positions[row, part] = number, np.arange(part.stop - start)
                start = part.stop
        return {"tokens": tokens, "targets": targets, "documents": documents, "positions": positions}


class Preferences(Supervised):
    """Pairs of answers to the same prompt. A sequence has both, each with the prompt, as two documents."""

    reader: type[ExampleReader] = PairReader
    loss_settings: ClassVar[tuple[str, ...]] = ("dpo_beta", "preference_loss", "simpo_margin")

    #: Those of layers/preference.py preference_loss, which loads torch.
    sums: int = 4

    #: fp32 (pairs, 2), log-probabilities of both answers under the reference model, in the order of the files; None if steps compute them.
    reference: np.ndarray | None = None

    @property
    def documents(self) -> int:
        """See Objective: pairs."""
        return int(self.samples.counts[0])

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: as Supervised, the choices, and the log-probabilities of the reference if they are known, fp32 (n, 2)."""
        arrays = super().arrays(indices)
        arrays["choices"] = np.select([arrays["documents"] == 0, arrays["documents"] == 1], [1, -1], 0)
        if self.reference is not None:
            arrays["reference"] = self.reference[self.samples.places(indices)]
        return arrays

    def measures(self, sums: np.ndarray) -> dict[str, float]:
        """See Objective: mean rewards of both answers, their difference, and how often the preferred one has the larger."""
        chosen, rejected, accuracy = (sums[:3] / max(sums[3], 1)).tolist()
        named = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": accuracy}
        return {f"validation_rewards_{name}": value for name, value in named.items()}
