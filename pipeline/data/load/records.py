"""The formats of fine-tuning records: which one a line has, and the chat or the texts that it stands for.

Formats are found by their keys. A record with the keys of two formats is refused, and what a format does not use is counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pipeline.common.json_lines import BadLine
from pipeline.data.tokenize.chats import REFUSED_KEYS, TEMPLATE_KEYS, ChatError

#: Names of roles in ShareGPT's "from".
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
#: Format -> keys that a record has, for messages.
FORMATS = {
    "messages": '"messages"',
    "ShareGPT": '"conversations"',
    "Alpaca": '"instruction" and "output"',
    "prompt and completion": '"prompt" and "completion"',
}
#: Keys that say which format a record has.
_MARKS = {"messages": "messages", "conversations": "ShareGPT", "instruction": "Alpaca", "completion": "prompt and completion"}


@dataclass(frozen=True)
class TextRecord:
    """A prompt and its completion, which are used as they are.

    Attributes:
        format: name of the format; empty for the second answer of a pair.
        unused: keys of the record that the format does not use.
    """

    prompt: str
    completion: str
    format: str = ""
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatRecord:
    """Messages for the chat template.

    Attributes:
        messages: of the record, not checked yet.
        fields: the record, for variables of the template.
        given: number of first messages that are the prompt, whose answers are not learned.
        format: name of the format; empty for the second answer of a pair.
        unused: keys of the record that the format does not use.
    """

    messages: Any
    fields: Mapping[str, Any]
    given: int = 0
    format: str = ""
    unused: tuple[str, ...] = ()


Record = TypeVar("Record", TextRecord, ChatRecord, TextRecord | ChatRecord)


@dataclass
class Notes:
    """What the usable records of a file have in common, and what of them is not used.

    Attributes:
        formats: format -> number of records.
        ignored: key -> number of records with it.
        spelled: special token -> number of prompts and completions that spell it.
    """

    formats: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    spelled: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, unused: Iterable[str]) -> None:
        """Count a usable record."""
        if name:
            self.formats[name] += 1
            self.ignored.update(unused)


def record_of(fields: Any) -> ChatRecord | TextRecord:
    """Return the content of a record with an answer.

    Raises:
        BadLine: it has no format, or those of two.
    """
    fields = _present(fields, 'with "messages", "conversations", "instruction" and "output", or "prompt" and "completion"')
    names = [name for mark, name in _MARKS.items() if mark in fields]
    if not names and "prompt" in fields:
        raise BadLine('has a "prompt" and no "completion"')
    if len(names) != 1:
        several = f"has the keys of several formats: {', '.join(FORMATS[name] for name in names)}"
        raise BadLine(several if names else f"must be an object with {', or '.join(FORMATS.values())}")
    (name,) = names
    record, used = _READERS[name](fields)
    is_chat = name == "prompt and completion" and isinstance(record, ChatRecord)
    return _noted(record, f"conversational {name}" if is_chat else name, fields, used)


def pair_of(fields: Any) -> tuple[ChatRecord | TextRecord, ChatRecord | TextRecord]:
    """Return the two examples of a record with a preferred answer and another one.

    Raises:
        BadLine: it has no such format.
    """
    fields = _present(fields, 'with "chosen" and "rejected", and "prompt" or "messages" unless they are whole chats')
    if missing := [name for name in ("chosen", "rejected") if name not in fields]:
        raise BadLine(f'has no "{missing[0]}"')
    chosen, rejected = fields["chosen"], fields["rejected"]
    if chosen == rejected:
        raise BadLine('"chosen" and "rejected" are the same')
    if _is_whole_chat(chosen) and _is_whole_chat(rejected):
        return _whole_chats(fields)
    if ("messages" in fields) == ("prompt" in fields):
        raise BadLine('must be an object with either "messages" or "prompt", and with "chosen" and "rejected"')
    key = "messages" if "messages" in fields else "prompt"
    preferred, other = (_answered(fields, key, name) for name in ("chosen", "rejected"))
    name = "preferences" if isinstance(preferred, TextRecord) else "conversational preferences"
    return _noted(preferred, name, fields, {key, "chosen", "rejected"}), other


def _present(fields: Any, expected: str) -> dict[str, Any]:
    """Return the keys of a record that are set; Arrow writes null for absent ones."""
    if not isinstance(fields, dict):
        raise BadLine(f"must be an object {expected}")
    present = {key: value for key, value in fields.items() if value is not None}
    if refused := [key for key in REFUSED_KEYS if present.get(key) not in (None, [], "")]:
        raise BadLine(f'has "{refused[0]}", which is not supported; remove it')
    return present


def _noted(record: Record, name: str, fields: Mapping[str, Any], used: set[str]) -> Record:
    """Return a record with its format and the keys that this does not use."""
    template_keys = TEMPLATE_KEYS if isinstance(record, ChatRecord) else ()
    return replace(record, format=name, unused=tuple(key for key in fields if key not in used and key not in template_keys))


def _messages(fields: Mapping[str, Any]) -> tuple[ChatRecord, set[str]]:
    """{"messages": [...]}; "prompt" beside it, as in UltraChat, is one of them."""
    return ChatRecord(fields["messages"], fields), {"messages"}


def _sharegpt(fields: Mapping[str, Any]) -> tuple[ChatRecord, set[str]]:
    """{"conversations": [{"from": "human", "value": ...}, ...]}, with "system" beside it."""
    turns = fields["conversations"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise BadLine('"conversations" must be a list of objects with "from" and "value"')
    messages = [*_system(fields), *(_turn(number, turn) for number, turn in enumerate(turns, 1))]
    return ChatRecord(messages, fields), {"conversations", "system"}


def _turn(number: int, turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn of ShareGPT as a message; some files have "role" and "content" in it."""
    if "from" not in turn:
        return dict(turn)
    if turn["from"] not in _SPEAKERS:
        rule = f'turn {number} is "from" {json.dumps(turn["from"])}, which is none of'
        raise BadLine(f"{rule} {', '.join(_SPEAKERS)}")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _SPEAKERS[turn["from"]], "content": turn.get("value"), **others}


def _alpaca(fields: Mapping[str, Any]) -> tuple[ChatRecord, set[str]]:
    """{"instruction": ..., "input": ..., "output": ...}: a question, with the input in a line of its own, and its answer."""
    for key in ("instruction", "output", "input"):
        if not isinstance(fields.get(key, "" if key == "input" else None), str):
            raise BadLine(f'"{key}" must be a text' if key in fields else f'has no "{key}"')
    question = "\n".join(text for text in (fields["instruction"], fields.get("input")) if text)
    messages = [*_system(fields), {"role": "user", "content": question}, {"role": "assistant", "content": fields["output"]}]
    return ChatRecord(messages, fields), {"instruction", "input", "output", "system"}


def _system(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the system message of a record that has it as a key."""
    return [{"role": "system", "content": fields["system"]}] if fields.get("system") else []


def _completion(fields: Mapping[str, Any]) -> tuple[ChatRecord | TextRecord, set[str]]:
    """{"prompt": ..., "completion": ...}: two texts, or two lists of messages."""
    if "prompt" not in fields:
        raise BadLine('has a "completion" and no "prompt"')
    return _answered(fields, "prompt", "completion"), {"prompt", "completion"}


def _answered(fields: Mapping[str, Any], key: str, name: str) -> ChatRecord | TextRecord:
    """Return the prompt under `key` with the answer under `name`."""
    prompt, answer = fields[key], fields[name]
    if isinstance(prompt, list) and prompt:
        messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) and answer else answer
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in [*prompt, *messages]):
            raise BadLine(f'"{name}" must be a list of messages, or a text that is not empty, as "{key}" is a list of messages')
        if prompt[-1].get("role") not in ("user", "tool"):
            raise ChatError(f'"{key}" ends with the role {json.dumps(prompt[-1].get("role"))}; it must end with the user or a tool')
        return ChatRecord([*prompt, *messages], fields, len(prompt))
    if not isinstance(prompt, str):
        raise BadLine(f'"{key}" must be a text or a list of messages')
    if not isinstance(answer, str) or not answer:
        raise BadLine(f'"{name}" must be a text that is not empty, as "{key}" is a text')
    return TextRecord(prompt, answer)


def _is_whole_chat(answer: Any) -> bool:
    """Whether an answer is a list of messages with its prompt."""
    return isinstance(answer, list) and bool(answer) and isinstance(answer[0], dict) and answer[0].get("role") != "assistant"


def _whole_chats(fields: Mapping[str, Any]) -> tuple[ChatRecord, ChatRecord]:
    """Two chats that begin with the same messages, as in UltraFeedback; "prompt" beside them is one of these messages."""
    chosen, rejected = fields["chosen"], fields["rejected"]
    differences = (number for number, (left, right) in enumerate(zip(chosen, rejected, strict=False)) if left != right)
    shared = next(differences, min(len(chosen), len(rejected)))
    if not shared or not isinstance(chosen[shared - 1], dict) or chosen[shared - 1].get("role") not in ("user", "tool"):
        raise BadLine('"chosen" and "rejected" are chats that do not begin with the same messages up to a question')
    prompt = fields.get("prompt")
    asked = [message.get("content") for message in chosen[:shared] if isinstance(message, dict)]
    if isinstance(prompt, list) and prompt != chosen[:shared]:
        raise BadLine('"prompt" differs from the first messages of "chosen" and "rejected"')
    if isinstance(prompt, str) and prompt.strip() not in [text.strip() for text in asked if isinstance(text, str)]:
        raise BadLine('"prompt" is none of the messages with which "chosen" and "rejected" begin')
    preferred = _noted(ChatRecord(chosen, fields, shared), "preferences as chats", fields, {"chosen", "rejected", "prompt"})
    return preferred, ChatRecord(rejected, fields, shared)


#: Format -> reads a record, and names the keys that it uses.
_READERS: dict[str, Callable[[Mapping[str, Any]], tuple[ChatRecord | TextRecord, set[str]]]] = {
    "messages": _messages,
    "ShareGPT": _sharegpt,
    "Alpaca": _alpaca,
    "prompt and completion": _completion,
}
