"""Examples of prompts and chats with answers, from JSON lines, tokenized. records.py has the formats of a line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipeline.common import json_lines
from pipeline.common.errors import UserError
from pipeline.common.json_lines import BadLine
from pipeline.data.load.records import ChatRecord, Notes, TextRecord, pair_of, record_of
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.chat_encoding import ChatEncoder
from pipeline.data.tokenize.chat_template import ChatTemplate, Span
from pipeline.data.tokenize.chats import ChatError, chat_of
from pipeline.data.tokenize.tokenizer import PromptEncoder, load

log = logging.getLogger("pipeline")
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Example:
    """A tokenized line.

    Attributes:
        tokens: (n,) int64.
        is_answer: (n,) bool, the tokens that the model learns to write; never the first one.
        cut: number of tokens that were removed from its end.
    """

    tokens: np.ndarray
    is_answer: np.ndarray
    cut: int = 0


class TooLongError(BadLine):
    """A line that is left out because of its length."""


@dataclass(frozen=True)
class _Chat:
    """A rendered chat: its text, where its answers begin, the answers to learn, and whether the last message is one of them."""

    text: str
    begins: list[int]
    answers: list[Span]
    ends: bool


class ExampleReader:
    """Parses and tokenizes lines.

    A prompt gets the special tokens around a text, as in stage=generate; a chat template writes its own. Where prompts and completions
    spell special tokens, tokenizer.spelled decides.

    Args:
        end_of_document: token that ends every example whose last part is an answer.
        longest: maximum number of tokens of an example.
        template: of chats; default: that of the folder.
        texts: encodes prompts and completions; default: PromptEncoder.

    Attributes:
        notes: formats and unused keys of the lines that were read; a caller may replace it.

    Raises:
        UserError: the folder has no tokenizer, or its chat template cannot be compiled.
    """

    def __init__(
        self,
        folder: Path,
        end_of_document: int,
        longest: int,
        too_long: str = "refuse",
        template: ChatTemplate | None = None,
        texts: PromptEncoder | None = None,
        *,
        repair: bool = False,
    ) -> None:
        self._folder, self._end, self._longest, self._too_long = folder, end_of_document, longest, too_long
        tokenizer = load(folder)
        self._chats, self._text_encoder = ChatEncoder(tokenizer), texts or PromptEncoder(tokenizer)
        self._template = template or chat_template.load(folder)
        self.notes, self._repair = Notes(), repair

    #: Examples of a line.
    per_line = 1
    #: What an example is, and a line with one, for messages.
    kind, example_line = "examples", '{"prompt": "2 + 2 =", "completion": " 4"}'

    def examples(self, lines: Sequence[bytes]) -> list[list[Example] | BadLine]:
        """Return the examples of every line, or why it has none."""
        return [example if isinstance(example, BadLine) else [example] for example in self.read(lines)]

    def read(self, lines: Sequence[bytes]) -> list[Example | BadLine]:
        """Return the example of every line, or why it is none."""
        records = [_parsed(line, record_of) for line in lines]
        return [example if isinstance(example, BadLine) else self._fitted(example) for example in self._encoded(records)]

    def _encoded(self, records: Sequence[ChatRecord | TextRecord | BadLine]) -> list[Example | BadLine]:
        """Return the examples of records, of any length."""
        parsed = [self._rendered(record) if isinstance(record, ChatRecord) else record for record in records]
        examples: dict[int, Example | BadLine] = {number: line for number, line in enumerate(parsed) if isinstance(line, BadLine)}
        chats = {number: line for number, line in enumerate(parsed) if isinstance(line, _Chat)}
        pairs = {number: line for number, line in enumerate(parsed) if isinstance(line, TextRecord)}
        encoded = self._chats.encode([(chat.text, chat.begins) for chat in chats.values()])
        for (number, chat), (tokens, places) in zip(chats.items(), encoded, strict=True):
            is_answer = _in_spans(places, chat.answers)
            for stop in np.flatnonzero(is_answer[:-1] & ~is_answer[1:]).tolist():  # what follows an answer ends it, unless it has an end
                is_answer[stop + 1] = tokens[stop + 1] == self._turn != tokens[stop]
            examples[number] = self._finished(tokens, is_answer, ends=chat.ends)
        prompts = self._tokens([pair.prompt for pair in pairs.values()], complete=True)
        completions = self._tokens([pair.completion for pair in pairs.values()])
        for number, prompt, completion in zip(pairs, prompts, completions, strict=True):
            before = prompt or [self._end]
            is_answer = np.arange(len(before) + len(completion)) >= len(before)
            examples[number] = self._finished([*before, *completion], is_answer, ends=True)
        for number, record in enumerate(records):
            if not isinstance(record, BadLine) and not isinstance(examples[number], BadLine):
                self.notes.add(record.format, record.unused)
        return [examples[number] for number in range(len(records))]

    @cached_property
    def _turn(self) -> int | None:
        """The token that ends an answer in the middle of a chat."""
        token = None if self._template is None else chat_template.end_of_turn(self._template, self._chats)
        if token is None:
            log.warning("the chat template has no special token that ends an answer: only the last one of a chat learns to end")
        return token

    def _tokens(self, texts: Sequence[str], *, complete: bool = False) -> list[list[int]]:
        """Encode texts, and note the special tokens that they spell."""
        ids = self._text_encoder.encode(texts, complete=complete)
        self.notes.spelled.update(self._text_encoder.spelled)
        self._text_encoder.spelled.clear()
        return ids

    def _rendered(self, record: ChatRecord) -> _Chat | BadLine:
        """Return a chat in the template of the tokenizer, or why it cannot be used; raises UserError without a template."""
        if self._template is None:
            rule = f"is required: the examples are chats, and the tokenizer of {self._folder} has no template"
            raise UserError.of("tokenizer.chat_template", None, rule, f"set it to {chat_template.NAMES}, or to a Jinja file")
        try:
            chat = chat_of(record.messages, self._template.names, record.fields, answered=True, given=record.given, repair=self._repair)
            text, answers, learned = self._template.answers(chat)
        except ChatError as error:
            return error
        self.notes.ignored.update({f"messages.{key}": count for key, count in chat.ignored.items()})
        return _Chat(text, [first for first, _ in answers], learned, chat.learned[-1])

    def _finished(self, tokens: list[int], is_answer: np.ndarray, *, ends: bool) -> Example | BadLine:
        """Append the end-of-document token where an answer comes last, unless this ends with it."""
        if not is_answer[1:].any():
            return BadLine("has no answer")
        last = tokens[int(np.flatnonzero(is_answer)[-1])]
        if ends and self._end not in (last, tokens[-1]):
            tokens, is_answer = [*tokens, self._end], np.append(is_answer, True)
        is_answer[0] = False
        return Example(np.array(tokens, dtype=np.int64), is_answer)

    def _fitted(self, example: Example, room: int | None = None, needed: str = "") -> Example | BadLine:
        """Return an example that there is room for, cut at its end if data.instructions.too_long allows it.

        Args:
            room: maximum number of its tokens; default: that of a sequence.
            needed: what does not fit, for messages; default: its tokens.
        """
        room, count = self._longest if room is None else room, len(example.tokens)
        if count <= room:
            return example
        rule = f"has {needed or f'{count} tokens'}; training.sequence_length={self._longest - 1} has room for {self._longest}"
        if self._too_long == "refuse":
            return BadLine(rule)
        if self._too_long == "drop" or not example.is_answer[:room].any():
            return TooLongError(rule if self._too_long == "drop" else f"{rule}, and its answers begin later")
        return Example(example.tokens[:room], example.is_answer[:room], count - room)


class PairReader(ExampleReader):
    """Reads pairs of answers: {"prompt", "chosen", "rejected"}, with texts or lists of messages; or chats with the same first messages.

    A line has two examples, the preferred answer and the other one, each with the prompt, whose answers are not learned.
    """

    per_line = 2

    def examples(self, lines: Sequence[bytes]) -> list[list[Example] | BadLine]:
        """See ExampleReader."""
        both = [_parsed(line, pair_of) for line in lines]
        answers = iter(self._encoded([record for pair in both if not isinstance(pair, BadLine) for record in pair]))
        return [pair if isinstance(pair, BadLine) else self._joined(next(answers), next(answers)) for pair in both]

    def _joined(self, chosen: Example | BadLine, rejected: Example | BadLine) -> list[Example] | BadLine:
        """Return both examples if a sequence has room for them together; else the longer one is cut, or both."""
        if isinstance(chosen, BadLine):
            return BadLine(f'"chosen" {chosen}')
        if isinstance(rejected, BadLine):
            return BadLine(f'"rejected" {rejected}')
        first, second = len(chosen.tokens), len(rejected.tokens)
        room = self._longest + 1  # an example takes one token less than it has
        if first + second <= room:
            return [chosen, rejected]
        needed, half = f"{first + second - 2} tokens with both answers", room // 2
        cut_chosen = self._fitted(chosen, max(room - second, half), needed)
        cut_rejected = self._fitted(rejected, max(room - first, room - half), needed)
        if isinstance(cut_chosen, BadLine):
            return cut_chosen
        if isinstance(cut_rejected, BadLine):
            return cut_rejected
        if cut_chosen.tokens.tolist() == cut_rejected.tokens.tolist():
            return TooLongError(f"has {needed}; training.sequence_length={self._longest - 1} cuts the part in which they differ")
        return [cut_chosen, cut_rejected]


def _parsed(line: bytes, record: Callable[[Any], Parsed]) -> Parsed | BadLine:
    """Return what a function makes of the JSON of a line, or why it cannot."""
    try:
        return record(json_lines.parse(line))
    except BadLine as error:
        return error


def _in_spans(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Return which tokens have a character in one of the spans, bool (tokens,)."""
    first, last = offsets.T
    inside = np.zeros(len(first), dtype=bool)
    for start, stop in spans:
        inside |= (last > np.maximum(first, start)) & (first < stop)
    return inside
