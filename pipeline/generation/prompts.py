"""Reads prompts from JSON lines: `{"prompt": TEXT}` or `{"messages": [...]}` in the chat template of the tokenizer."""

from __future__ import annotations

import heapq
import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.common import json_lines
from pipeline.common.errors import UserError
from pipeline.common.json_lines import BadLine
from pipeline.config.stages import Generate
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.chat_encoding import ChatEncoder
from pipeline.data.tokenize.chat_template import ChatTemplate
from pipeline.data.tokenize.chats import chat_of
from pipeline.data.tokenize.tokenizer import PromptEncoder, load

#: Maximum number of lines of a part, the unit of resuming; a small file has about PARTS parts, so that many ranks share it.
PART_LINES, PARTS = 256, 64
#: Number of lines that are encoded before generation begins, for the size of the cache.
LARGEST = 8


@dataclass(frozen=True)
class Prompt:
    """A line of the file, numbered from 1; `text` is what a template made of it, None without a template."""

    line: int
    fields: dict[str, Any]
    tokens: list[int]
    text: str | None = None


class PromptFile:
    """A file of prompts, in parts of consecutive lines. The parts do not depend on the number of ranks.

    Raises:
        UserError: the file cannot be read, or has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as handle:
                starts = [0, *(handle.tell() for _ in iter(handle.readline, b""))]
        except OSError as error:
            raise UserError.of("stage.prompts", path, f"cannot be read: {error.strerror}", "set it to a file of JSON lines") from error
        self.lines = len(starts) - 1
        if self.lines == 0:
            raise UserError.of("stage.prompts", path, "is empty", 'write a line such as {"prompt": "Once upon a time"} for each prompt')
        sizes = [end - start for start, end in pairwise(starts)]
        largest = heapq.nlargest(LARGEST, range(self.lines), key=sizes.__getitem__)
        self._largest = [(number + 1, starts[number]) for number in largest]
        self._per_part = min(PART_LINES, -(-self.lines // PARTS))
        self._starts = starts[: -1 : self._per_part]

    @property
    def parts(self) -> range:
        """Numbers of the parts."""
        return range(len(self._starts))

    def largest(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines with the most bytes, each with its number from 1: the longest prompt is likely among them."""
        with open(self.path, "rb") as handle:
            for number, start in self._largest:
                handle.seek(start)
                yield number, handle.readline().strip()

    def read(self, part: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of a part that are not blank, each with its number from 1."""
        first = part * self._per_part
        with open(self.path, "rb") as handle:
            handle.seek(self._starts[part])
            for number in range(first + 1, min(first + self._per_part, self.lines) + 1):
                if line := handle.readline().strip():
                    yield number, line


class PromptReader:
    """Parses and encodes lines.

    Args:
        max_positions: longest sequence of the model, tokens.
        vocab_size: rows of the model's embedding.
        end_of_document: token that an empty prompt consists of.
        encoder: whether prompts are the input of an encoder: they end with the end-of-document token, and may fill the sequence.
        template: makes the prompts of lines with any fields.
        texts: encodes prompts that are no chats; default: PromptEncoder.

    Raises:
        UserError: the folder has no tokenizer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_positions: int,
        vocab_size: int,
        end_of_document: int,
        encoder: bool = False,
        template: PromptTemplate | None = None,
        chats: ChatTemplate | None = None,
        texts: PromptEncoder | None = None,
    ) -> None:
        self.folder, self.max_positions, self.vocab_size = folder, max_positions, vocab_size
        self.end_of_document, self.encoder, self.template = end_of_document, encoder, template
        self.chats, self.tokenizer = chats, load(folder)
        self.chat_encoder = ChatEncoder(self.tokenizer)
        self.text_encoder = texts or PromptEncoder(self.tokenizer)

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text: the end-of-document token, and the one with which the template ends an answer."""
        turn = None if self.chats is None else chat_template.end_of_turn(self.chats, self.chat_encoder)
        return [self.end_of_document, *([] if turn is None else [turn])]

    def parse(self, number: int, line: bytes) -> Prompt:
        """Return the prompt of a line.

        Raises:
            BadLine: it is no prompt, or the model cannot continue it.
        """
        fields = json_lines.parse(line)
        text = None
        if self.template is not None:
            if not isinstance(fields, dict):
                raise BadLine("must be an object")
            text = self.template.render(number, fields)
            tokens = self._encode_text(text)
        elif not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
            raise BadLine('must be an object with either "prompt" or "messages"')
        else:
            tokens = self._encode_chat(fields) if "messages" in fields else self._encode_text(fields["prompt"])
        if len(tokens) + (0 if self.encoder else 1) > self.max_positions:
            room = "" if self.encoder else " leaves no room for a completion"
            raise BadLine(f"the prompt has {len(tokens)} tokens; model.max_positions={self.max_positions}{room}")
        if max(tokens) >= self.vocab_size:
            raise BadLine(f"the prompt has token {max(tokens)}; the model has model.vocab_size={self.vocab_size}")
        return Prompt(number, fields, tokens, text)

    def longest(self, prompts: PromptFile) -> list[int]:
        """Return the longest prompt of the lines with the most bytes; empty if none of them is a prompt."""
        longest: list[int] = []
        for number, line in prompts.largest():
            with suppress(BadLine):
                longest = max(longest, self.parse(number, line).tokens, key=len)
        self.text_encoder.spelled.clear()
        return longest

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def completion(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text of a completion; a tokenizer may write its first token differently at the start of a text."""
        before, whole = self.decode(prompt), self.decode([*prompt, *tokens])
        return whole[len(before) :] if whole.startswith(before) else self.decode(tokens)

    def _encode_text(self, text: Any) -> list[int]:
        """Encode a text with the special tokens around it."""
        if not isinstance(text, str):
            raise BadLine('"prompt" must be a text')
        return self._complete(self.text_encoder.encode([text], complete=True)[0])

    def _encode_chat(self, fields: dict[str, Any]) -> list[int]:
        """Encode a chat with the template of the tokenizer, as training does."""
        if self.chats is None:
            fix = f"set tokenizer.chat_template={chat_template.NAMES}, or a file"
            raise BadLine(f"is a chat, and {self.folder} has no chat template ({fix})")
        text, begins = self.chats.prompt(chat_of(fields["messages"], self.chats.names, fields, answered=False))
        ((tokens, _),) = self.chat_encoder.encode([(text, begins)])
        return self._complete(tokens)

    def _complete(self, tokens: list[int]) -> list[int]:
        """Append the end-of-document token to the input of an encoder; an empty prompt consists of it."""
        if self.encoder and tokens[-1:] != [self.end_of_document]:
            tokens.append(self.end_of_document)
        return tokens or [self.end_of_document]


#: The variable of a template with the examples.
EXAMPLES = "examples"


def open_template(stage: Generate) -> PromptTemplate | None:
    """Open stage.template with its examples, None without a template; raises as PromptTemplate."""
    if stage.template is None:
        return None
    examples = None if stage.examples is None else Path(stage.examples)
    return PromptTemplate(Path(stage.template), examples, stage.few_shot or 0, stage.seed)


class PromptTemplate:
    """A template file with its examples.

    Args:
        examples: JSON lines with the fields of examples; None without.

    Raises:
        UserError: a file cannot be read, the template is none or does not show the examples, or there are too few examples.
    """

    def __init__(self, path: Path, examples: Path | None, count: int, seed: int) -> None:
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        text = _read("stage.template", path)
        try:
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            rule = f"line {error.lineno} is not valid in a Jinja template: {error.message}"
            raise UserError.of("stage.template", path, rule, "correct this line") from error
        if count and EXAMPLES not in meta.find_undeclared_variables(environment.parse(text)):
            fix = f"write {{% for example in {EXAMPLES} %}} ... {{% endfor %}} in it, or set stage.few_shot=0"
            raise UserError.of("stage.template", path, f"does not use {EXAMPLES}, the variable of stage.examples", fix)
        self._examples = [] if examples is None else _lines(examples)
        self._count, self._seed = count, seed
        if count > len(self._examples):
            rule = f"exceeds the {len(self._examples)} examples of stage.examples={examples}"
            raise UserError.of("stage.few_shot", count, rule, "lower it, or add examples")

    def render(self, number: int, fields: dict[str, Any]) -> str:
        """Return the prompt of a line. Its examples depend on the seed and the number of the line; the line itself is none of them.

        Args:
            fields: of the line; the variables of the template.

        Raises:
            BadLine: a field is missing, the template fails, or there are too few other examples.
        """
        if EXAMPLES in fields and self._examples:
            raise BadLine(f'has a field "{EXAMPLES}", which is the variable of stage.examples')
        others = [example for example in self._examples if example != fields] if self._count else []
        if len(others) < self._count:
            raise BadLine(f"stage.few_shot={self._count} exceeds the {len(others)} examples that differ from this line")
        chosen = random.Random(f"{self._seed} {number}").sample(others, self._count)
        try:
            return self._template.render({EXAMPLES: chosen, **fields})
        except Exception as error:  # of the user's template, which may raise anything
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
            where = f" in line {lines[-1]}" if lines else ""
            raise BadLine(f"stage.template fails{where}: {error}") from error


def _read(key: str, path: Path) -> str:
    """Return the text of a file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError.of(key, path, f"cannot be read: {error.strerror}", "set it to a readable file") from error
    except UnicodeDecodeError as error:
        raise UserError.of(key, path, f"is not UTF-8: {error}", "convert it to UTF-8") from error


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines.

    Raises:
        UserError: it cannot be read, or a line is not an object.
    """
    records = []
    for number, line in enumerate(_read("stage.examples", path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json_lines.parse(line.encode())
            if not isinstance(fields, dict):
                raise BadLine("is not an object")
        except BadLine as error:
            raise UserError.of("stage.examples", path, f"line {number} {error}", "correct or remove this line") from error
        records.append(fields)
    return records
