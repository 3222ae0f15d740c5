"""Sequence classification by a bidirectional encoder: the label of a text or a pair of texts (Devlin et al. 2019, section 4.1)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import xxhash

from pipeline.common import json_lines
from pipeline.common.errors import UserError
from pipeline.common.json_lines import BadLine
from pipeline.config.schema import RunConfig
from pipeline.data.load import example_parts
from pipeline.data.load.instructions import open_files
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.objectives.supervised import Supervised
from pipeline.data.load.prompts_and_answers import Example, ExampleReader, TooLongError
from pipeline.data.load.special_tokens import SpecialTokens, enclosing_tokens
from pipeline.data.read.input_files import Span
from pipeline.data.tokenize.tokenizer import PromptEncoder, TextEncoder


class LabelReader(ExampleReader):
    """Parses and tokenizes lines. The last token of an example is the number of its label.

    Args:
        end_of_document: as in ExampleReader; not used.
        longest: maximum number of tokens of a sequence.
        special: the token before the texts, those between two texts, and the one after them.
        too_long: data.instructions.too_long; texts are cut at the end, of a pair the longer one.
    """

    kind = "texts"
    example_line = '{"text": "What a film!", "label": "good"}'

    def __init__(
        self,
        folder: Path,
        end_of_document: int,
        longest: int,
        labels: Sequence[str],
        special: tuple[int, tuple[int, ...], int],
        *,
        too_long: str,
        texts: PromptEncoder | None = None,
    ) -> None:
        super().__init__(folder, end_of_document, longest, too_long, texts=texts)
        self._numbers = {label: number for number, label in enumerate(labels)}
        self._special = special

    def read(self, lines: Sequence[bytes]) -> list[Example | BadLine]:
        """See ExampleReader."""
        parsed = [self._texts(line) for line in lines]
        texts = [text for line in parsed if not isinstance(line, BadLine) for text in line[0]]
        encoded = iter(self._tokens(texts))
        return [line if isinstance(line, BadLine) else self._joined([next(encoded) for _ in line[0]], line[1]) for line in parsed]

    def _texts(self, line: bytes) -> tuple[list[str], int] | BadLine:
        """Return the texts of a line and the number of its label, or the reason why it cannot be used."""
        try:
            fields = json_lines.parse(line)
            name = label_of(fields)
        except BadLine as error:
            return error
        if name not in self._numbers:
            return BadLine(f'"label" is {name!r}, which is none of {", ".join(self._numbers)}')
        texts = [fields.get("text"), *([fields["text_pair"]] if "text_pair" in fields else [])]
        for key, text in zip(("text", "text_pair"), texts, strict=False):
            if not isinstance(text, str) or not text:
                return BadLine(f'"{key}" must be a text that is not empty' if key in fields else f'has no "{key}"')
        self.notes.add("labeled texts", (key for key in fields if key not in ("text", "text_pair", "label")))
        return texts, self._numbers[name]

    def _joined(self, texts: list[list[int]], label: int) -> Example | BadLine:
        """Return the sequence of one or two tokenized texts with its label."""
        first, between, last = self._special
        room = self._longest - 2 - (len(texts) - 1) * len(between)
        if (needed := sum(map(len, texts))) > room:
            if self._too_long != "truncate":
                rule = f"has {needed} tokens of text; training.sequence_length={self._longest} has room for {room}"
                return TooLongError(rule) if self._too_long == "drop" else BadLine(rule)
            for _ in range(needed - room):
                max(reversed(texts), key=len).pop()
        tokens = [first, *texts[0], *(token for text in texts[1:] for token in (*between, *text)), last, label]
        is_label = np.zeros(len(tokens), dtype=bool)
        is_label[-1] = True
        return Example(np.array(tokens, dtype=np.int64), is_label, max(0, needed - room))


def label_of(fields: Any) -> str:
    """Return the label of a line as text.

    Raises:
        BadLine: it has none.
    """
    if not isinstance(fields, dict):
        raise BadLine('must be an object with "text" and "label"')
    if "label" not in fields:
        raise BadLine('has no "label"')
    label = fields["label"]
    if not isinstance(label, str | int) or isinstance(label, bool) or label == "":
        raise BadLine('"label" must be a text or an integer')
    return str(label)


def labels_of(paths: Sequence[str], key: str) -> list[str]:
    """Return the labels of files, sorted; numbers by value. Lines without a label are ignored: opening the files reports them.

    Args:
        paths: JSON lines, or Parquet.

    Raises:
        UserError: a file is missing.
    """
    labels = set()
    for source in example_parts.sources(paths, key):
        for line in example_parts.lines_of(Span(source)):
            with suppress(BadLine):
                labels.add(label_of(json_lines.parse(line)))
    if all(re.fullmatch("-?[0-9]+", label) for label in labels):
        return sorted(labels, key=int)
    return sorted(labels)


class Classification(Supervised):
    """One text, or pair of texts, in each sequence. The first position has the target: the number of the label in model.labels."""

    settings: ClassVar[tuple[str, ...]] = ("data.instructions.too_long", "tokenizer.path", "tokenizer.end_of_document")

    _between: int
    _segments: int

    @classmethod
    def _open(cls, config: RunConfig, paths: list[str], key: str, share: tuple[int, int], seed: int | None) -> Self:
        folder, length = Path(config.tokenizer.path), config.training.sequence_length
        model: Any = config.model
        encoder = TextEncoder.of(config.tokenizer)
        special, masking = SpecialTokens(folder, encoder.fingerprint), config.data.masking
        first, between = special.find(enclosing_tokens(masking))
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

    def fingerprint(self, config: RunConfig, consumed: int) -> str:  # noqa: ARG002
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
