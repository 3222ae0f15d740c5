"""Examples of prompts and chats with answers, from JSON lines, tokenized.

A line is `{"messages": [...]}` or `{"prompt": TEXT, "completion": TEXT}`; a pair of answers has `chosen` and `rejected` instead of the
completion.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import json_lines
from pipeline.common.json_lines import BadLine
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.chat_template import ChatError, Span
from pipeline.data.tokenize.tokenizer import load


@dataclass(frozen=True)
class Example:
    """A tokenized line.

    Attributes:
        tokens: (n,) int64.
        is_answer: (n,) bool, the tokens that the model learns to write; never the first one.
    """

    tokens: np.ndarray
    is_answer: np.ndarray


@dataclass(frozen=True)
class _Chat:
    """A rendered chat: its text, its answers, and whether an answer comes last."""

    text: str
    answers: list[Span]
    ends: bool


@dataclass(frozen=True)
class _Pair:
    """A prompt and its completion."""

    prompt: str
    completion: str


class ExampleReader:
    """Parses and tokenizes lines.

    Text of prompts and completions that spells a special token is ordinary text; a chat template writes special tokens as text. A prompt
    gets the special tokens of the tokenizer's post-processor, as in stage=generate.

    Args:
        folder: Hugging Face folder of the tokenizer.
        end_of_document: token that ends every example whose last part is an answer.
        longest: maximum number of tokens of an example.

    Raises:
        UserError: the folder has no tokenizer, or its chat template cannot be compiled.
    """

    def __init__(self, folder: Path, end_of_document: int, longest: int) -> None:
        self._folder, self._end, self._longest = folder, end_of_document, longest
        self._tokenizer = load(folder)
        self._template = chat_template.load(folder)
        self.template_text = self._template.text if self._template else ""

    #: Examples of a line.
    per_line = 1
    #: What an example is, and a line with one, for messages.
    kind, example_line = "examples", '{"prompt": "2 + 2 =", "completion": " 4"}'

    def examples(self, lines: Sequence[bytes]) -> list[list[Example] | BadLine]:
        """Return the examples of every line, or why it has none."""
        return [found if isinstance(found, BadLine) else [found] for found in self.read(lines)]

    def read(self, lines: Sequence[bytes]) -> list[Example | BadLine]:
        """Return the example of every line, or why it is none."""
        parsed = [self._try_to_parse(line) for line in lines]
        examples: dict[int, Example | BadLine] = {number: line for number, line in enumerate(parsed) if isinstance(line, BadLine)}
        chats = {number: line for number, line in enumerate(parsed) if isinstance(line, _Chat)}
        pairs = {number: line for number, line in enumerate(parsed) if isinstance(line, _Pair)}
        encoded = self._encode([chat.text for chat in chats.values()], special=True)
        for (number, chat), encoding in zip(chats.items(), encoded, strict=True):
            examples[number] = self._finished(encoding.ids, _in_spans(encoding.offsets, chat.answers), ends=chat.ends)
        prompts = self._encode([pair.prompt for pair in pairs.values()], special=False, complete=True)
        completions = self._encode([pair.completion for pair in pairs.values()], special=False)
        for number, prompt, completion in zip(pairs, prompts, completions, strict=True):
            before = prompt.ids or [self._end]
            is_answer = np.arange(len(before) + len(completion.ids)) >= len(before)
            examples[number] = self._finished([*before, *completion.ids], is_answer, ends=True)
        return [examples[number] for number in range(len(lines))]

    def _try_to_parse(self, line: bytes) -> _Chat | _Pair | BadLine:
        """As _parse, or the reason why the line cannot be used."""
        try:
            return self._parse(line)
        except (BadLine, ChatError) as error:
            return BadLine(str(error))

    def _parse(self, line: bytes) -> _Chat | _Pair:
        """Return the content of a line."""
        fields = json_lines.parse(line)
        if not isinstance(fields, dict) or ("messages" in fields) == ("prompt" in fields):
            raise BadLine('must be an object with either "messages", or "prompt" and "completion"')
        if "messages" in fields:
            if self._template is None:
                raise BadLine(f"{self._folder} has no chat template")
            text, answers = self._template.answers(fields["messages"])
            return _Chat(text, answers, fields["messages"][-1].get("role") == "assistant")
        prompt, completion = fields["prompt"], fields.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise BadLine('"prompt" and "completion" must be texts')
        if not completion:
            raise BadLine('"completion" is empty')
        return _Pair(prompt, completion)

    def _encode(self, texts: list[str], *, special: bool, complete: bool = False) -> Any:
        self._tokenizer.encode_special_tokens = not special
        return self._tokenizer.encode_batch(texts, add_special_tokens=complete)

    def _finished(self, tokens: list[int], is_answer: np.ndarray, *, ends: bool) -> Example | BadLine:
        """Append the end-of-document token where an answer comes last, and check the example."""
        if not is_answer[1:].any():
            return BadLine("has no answer")
        if ends and tokens[-1] != self._end:
            tokens, is_answer = [*tokens, self._end], np.append(is_answer, True)
        if len(tokens) > self._longest:
            return BadLine(f"has {len(tokens)} tokens; training.sequence_length={self._longest - 1} has room for {self._longest}")
        is_answer[0] = False
        return Example(np.array(tokens, dtype=np.int64), is_answer)


class PairReader(ExampleReader):
    """Reads pairs of answers: {"prompt", "chosen", "rejected"}, all texts or all lists of messages, or {"messages", "chosen", "rejected"}.

    A line has two examples, the preferred answer and the other one, each with the prompt.
    """

    per_line = 2

    def examples(self, lines: Sequence[bytes]) -> list[list[Example] | BadLine]:
        """See ExampleReader."""
        both = [self._try_to_split(line) for line in lines]
        answers = iter(self.read([text for pair in both if not isinstance(pair, BadLine) for text in pair]))
        return [pair if isinstance(pair, BadLine) else self._joined(next(answers), next(answers)) for pair in both]

    def _try_to_split(self, line: bytes) -> tuple[bytes, bytes] | BadLine:
        """Return the lines of the two examples, or the reason why the line cannot be used."""
        try:
            fields = json_lines.parse(line)
        except BadLine as error:
            return error
        if not isinstance(fields, dict) or ("messages" in fields) == ("prompt" in fields):
            return BadLine('must be an object with either "messages" or "prompt", and with "chosen" and "rejected"')
        if missing := [name for name in ("chosen", "rejected") if name not in fields]:
            return BadLine(f'has no "{missing[0]}"')
        if fields["chosen"] == fields["rejected"]:
            return BadLine('"chosen" and "rejected" are the same')
        prompt = fields.get("messages", fields.get("prompt"))
        chosen = self._example_of(prompt, fields["chosen"], "chosen")
        rejected = self._example_of(prompt, fields["rejected"], "rejected")
        if isinstance(chosen, BadLine):
            return chosen
        return rejected if isinstance(rejected, BadLine) else (chosen, rejected)

    @staticmethod
    def _example_of(prompt: Any, answer: Any, name: str) -> bytes | BadLine:
        """Return an answer and its prompt as a line of instructions."""
        if isinstance(prompt, list):
            messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            if not isinstance(messages, list) or not messages:
                return BadLine(f'"{name}" must be a text or a list of messages')
            return json.dumps({"messages": [*prompt, *messages]}).encode()
        if not isinstance(answer, str) or not answer:
            return BadLine(f'"{name}" must be a text that is not empty')
        return json.dumps({"prompt": prompt, "completion": answer}).encode()

    def _joined(self, chosen: Example | BadLine, rejected: Example | BadLine) -> list[Example] | BadLine:
        """Return both examples if they fit in a sequence together."""
        for name, example in (("chosen", chosen), ("rejected", rejected)):
            if isinstance(example, BadLine):
                return BadLine(f'"{name}" {example}')
        pair = [example for example in (chosen, rejected) if isinstance(example, Example)]
        needed, room = sum(len(example.tokens) - 1 for example in pair), self._longest - 1
        return BadLine(f"has {needed} tokens with both answers; training.sequence_length={room}") if needed > room else pair


def _in_spans(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """Return which tokens have a character in one of the spans, bool (tokens,)."""
    first, last = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(first), dtype=bool)
    for start, stop in spans:
        inside |= (last > np.maximum(first, start)) & (first < stop)
    return inside
