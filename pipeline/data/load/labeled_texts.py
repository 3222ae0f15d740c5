"""Lines of sequence classification: {"text": ..., "label": ...}, with "text_pair" for pairs of texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import json_lines
from pipeline.common.json_lines import BadLine
from pipeline.data.load import example_parts
from pipeline.data.load.prompts_and_answers import Example, ExampleReader, TooLongError
from pipeline.data.read.input_files import Span
from pipeline.data.tokenize.tokenizer import PromptEncoder


class LabelReader(ExampleReader):
    """Parses and tokenizes lines. The last token of an example is the number of its label.

    Args:
        folder: Hugging Face folder of the tokenizer.
        end_of_document: as in ExampleReader; not used.
        longest: maximum number of tokens of a sequence.
        labels: names of the labels.
        special: the token before the texts, those between two texts, and the one after them.
        too_long: data.instructions.too_long; texts are cut at the end, of a pair the longer one.
        texts: as in ExampleReader.
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
        self.template_text = ""  # of chats, which are not read

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
        key: configuration key that lists the files, for messages.

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
