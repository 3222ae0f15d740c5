"""Sequence classification by a bidirectional encoder: the label of a text or a pair of texts (Devlin et al. 2019, section 4.1)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import xxhash

from pipeline.common.errors import UserError
from pipeline.data.load.instructions import open_files
from pipeline.data.load.labeled_texts import LabelReader
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.objectives.supervised import Supervised
from pipeline.data.load.sample_config import SampleConfig
from pipeline.data.load.special_tokens import SpecialTokens
from pipeline.data.tokenize.tokenizer import TextEncoder


class Classification(Supervised):
    """One text, or pair of texts, in each sequence. The first position has the target: the number of the label in model.labels."""

    settings: ClassVar[tuple[str, ...]] = ("data.instructions.too_long", "tokenizer.path", "tokenizer.end_of_document")

    _between: int
    _segments: int

    @classmethod
    def _open(cls, config: SampleConfig, paths: list[str], key: str, share: tuple[int, int], seed: int | None) -> Self:
        folder, length = Path(config.tokenizer.path), config.training.sequence_length
        model: Any = config.model
        encoder = TextEncoder.of(config.tokenizer)
        special, masking = SpecialTokens(folder, encoder.fingerprint), config.data.masking
        first, between = special.find(
            {
                "data.masking.first": (masking.first, ("[CLS]", "<s>")),
                "data.masking.between": (masking.between, ("[SEP]", "</s>")),
            }
        )
        if model.padding_token is not None and model.padding_token not in special.ids.values():
            rule = f"has a text token with id {model.padding_token}, which the stock {model.family} class treats as padding"
            raise UserError.of("tokenizer.path", folder, rule, "use the tokenizer of the pretraining")
        # Between the texts of a pair RoBERTa has two separators (Liu et al. 2019), and BERT another segment.
        separators = (between,) * (2 if model.family == "roberta" else 1)
        too_long, limit = config.data.instructions.too_long, config.data.quarantine_limit
        around_texts = (first, separators, between)
        reader = LabelReader(folder, encoder.end_of_document, length, model.labels, around_texts, too_long=too_long, texts=encoder.prompts)
        report = Path(config.run_dir) if share[0] == 0 else None
        samples = open_files(paths, reader, encoder, key=key, length=length, pack=False, seed=seed, limit=limit, report=report)
        objective = cls(samples, length)
        objective._between, objective._segments = between, model.segments
        objective.sums = len(model.labels) ** 2
        return objective

    def fingerprint(self, config: SampleConfig, consumed: int) -> str:  # noqa: ARG002
        """See Objective: the lines, the tokenizer, and truncation; the labels are those of the model."""
        corpus = self.samples.corpora[0]
        content = (corpus.fingerprint, corpus.totals["tokenizer"], config.data.instructions.too_long == "truncate")
        return xxhash.xxh3_64_hexdigest(repr(content).encode())

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens, targets, documents (-1 for padding), and the segments of a model that has two."""
        shape = (len(indices), self._length)
        tokens, targets = np.full(shape, self.samples.end_of_document, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        documents, segments = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.int64)
        for row, (example,) in enumerate(self.samples.sequences(indices)):
            *text, label = example.tokens.tolist()
            tokens[row, : len(text)], documents[row, : len(text)], targets[row, 0] = text, 0, label
            segments[row, text.index(self._between) + 1 : len(text)] = 1
        arrays: dict[str, np.ndarray] = {"tokens": tokens, "targets": targets, "documents": documents}
        return arrays | ({"segments": segments} if self._segments > 1 else {})

    def measures(self, sums: np.ndarray) -> dict[str, float]:
        """See Objective: the share of correct labels, and the mean of the labels' F1 (labels that occur nowhere do not count)."""
        confusion = self.confusion(sums)
        occurrences = confusion.sum(axis=0) + confusion.sum(axis=1)
        f1 = 2 * confusion.diagonal()[occurrences > 0] / occurrences[occurrences > 0]
        return {"accuracy": float(confusion.trace() / confusion.sum()), "macro_f1": float(f1.mean())}

    def confusion(self, sums: np.ndarray) -> np.ndarray:
        """The number of texts by label (row) and by predicted label (column), in the order of model.labels; int64 (labels, labels)."""
        return sums.astype(np.int64).reshape(2 * (math.isqrt(self.sums),))
