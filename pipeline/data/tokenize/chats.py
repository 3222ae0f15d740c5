"""Chats as users write them: the checks of their messages, and what the chat template gets.

A chat is what OpenAI's and Hugging Face's libraries read: messages with "role" and "content", an assistant's "tool_calls", and beside the
messages "tools", "documents" and "chat_template_kwargs".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.common.json_lines import BadLine, parse

#: Keys of a record, beside the messages, that a chat template reads.
TEMPLATE_KEYS = ("tools", "documents", "chat_template_kwargs")
#: Keys of a record that would change what is learned or shown, and that are not supported.
REFUSED_KEYS = ("weight", "weights", "functions", "function_call", "images", "image", "videos", "video", "audio", "audios", "history")
#: Keys of a message that say whether an answer is learned: OpenAI's and axolotl's.
WEIGHT_KEYS = ("weight", "train")
#: Names of the reasoning before an answer; templates read the first one, and gpt-oss' reads the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: Keys of a message whose content must reach the text: a template that does not read them is refused.
_NEEDED = ("tool_calls", *_REASONING)
_REFUSED = ("training", "train_detail", "loss", "loss_weight", "weights", "mask", "function_call", "images", "audio", "refusal", "prefix")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MEANT = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant", "function": "tool"}


class ChatError(BadLine):
    """Messages that cannot be rendered; the message gives the reason."""


@dataclass(frozen=True)
class Chat:
    """A chat that has been checked.

    Attributes:
        messages: "role", "content" (a text, or None beside tool calls) and further keys that templates read.
        learned: for each message whether it is an answer that the model learns.
        ignored: keys that no template needs and this one does not read, with the number of their occurrences.
    """

    messages: list[dict[str, Any]]
    learned: list[bool]
    variables: dict[str, Any] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)


def chat_of(
    messages: Any, names: frozenset[str], fields: Mapping[str, Any] | None = None, *, answered: bool, given: int = 0, repair: bool = False
) -> Chat:
    """Check the messages of a record.

    The order of roles is: optionally a system (or developer) message; then user and assistant in turn, beginning with user. After an
    assistant's tool calls come messages of the role tool, and then the assistant.

    Args:
        fields: the record, for TEMPLATE_KEYS.
        answered: whether the last message must be an answer; it must not be one otherwise.
        given: number of first messages that are the prompt, whose answers are not learned.
        repair: data.instructions.repair; `ignored` counts it as "repaired".

    Raises:
        ChatError: the messages are not a chat, or have what the template does not read; names the message.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ChatError('"messages" must be a list of objects with "role" and "content"')
    ignored: Counter[str] = Counter()
    checked, learned = [], []
    for number, message in enumerate(messages, 1):
        try:
            checked.append(_message(message, names, ignored))
            learned.append(_is_learned(message) and number > given)
        except ChatError as error:
            raise ChatError(f"message {number} {error}") from None
    if repair:
        checked, learned = _repaired(checked, learned, ignored)
    _check_order(checked, answered=answered)
    if answered and not any(learned):
        raise ChatError("has no answer to learn: every answer has weight 0")
    return Chat(checked, learned, _variables(fields or {}, names), ignored)


def _repaired(messages: list[dict[str, Any]], learned: list[bool], ignored: Counter[str]) -> tuple[list[dict[str, Any]], list[bool]]:
    """Leave out answers before the first question, and join messages of one role that are learned alike and call no tool."""
    kept: list[tuple[dict[str, Any], bool]] = []
    for message, learns in zip(messages, learned, strict=True):
        role = message["role"]
        if role == "assistant" and all(earlier["role"] in ("system", "developer") for earlier, _ in kept):
            continue
        last, before = kept[-1] if kept else ({"role": None}, learns)
        plain = role != "tool" and not any(compared.keys() - {"role", "content"} for compared in (last, message))
        if last["role"] == role and before == learns and plain:
            kept[-1] = ({**last, "content": f"{last['content']}\n\n{message['content']}"}, learns)
        else:
            kept.append((message, learns))
    if len(kept) < len(messages):
        ignored["repaired"] += 1
    return [message for message, _ in kept], [learns for _, learns in kept]


def _message(message: Mapping[str, Any], names: frozenset[str], ignored: Counter[str]) -> dict[str, Any]:
    """Return a message with the keys that templates read."""
    fields = {key: value for key, value in message.items() if value is not None or key == "content"}  # Arrow writes null for absent keys
    role = fields.get("role")
    if role not in _ROLES:
        meant = _MEANT.get(str(role).lower(), str(role).lower())
        hint = f" ({meant} is meant?)" if meant in _ROLES else ""
        raise ChatError(f'has the role {json.dumps(role)}{hint}; "role" must be one of {", ".join(_ROLES)}')
    if refused := [key for key in _REFUSED if key in fields]:
        raise ChatError(f'has "{refused[0]}", which is not supported; remove it')
    if (calls := _tool_calls(fields)) is not None:
        if role != "assistant":
            raise ChatError(f"has tool_calls, and the role {role}")
        fields["tool_calls"] = calls
    else:
        fields.pop("tool_calls", None)
    if reasoning := next((fields[key] for key in _REASONING if key in fields), None):
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}  # as transformers does
        if not names & set(_REASONING):
            raise ChatError('has reasoning ("reasoning_content"), which the chat template does not show')
    if "tool_calls" in fields and "tool_calls" not in names:
        raise ChatError('has "tool_calls", which the chat template does not show')
    fields["content"] = _content(fields, ignored)
    if role == "assistant" and not (fields["content"] or "").strip() and not calls:
        raise ChatError("is an empty answer")
    known = {"role", "content", *WEIGHT_KEYS, *_NEEDED}
    ignored.update(key for key in fields if key not in known and key not in names)
    return {key: value for key, value in fields.items() if key not in WEIGHT_KEYS}


def _content(message: Mapping[str, Any], ignored: Counter[str]) -> str | None:
    """Return the content as text; parts of the type text are joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message.get("tool_calls"):
            return None
        raise ChatError('has no "content", which only an answer with tool_calls may lack')
    if not isinstance(content, list) or not content:
        raise ChatError('has a "content" that is neither a text nor a list of texts')
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            shown = f"of the type {json.dumps(kind)}" if isinstance(part, dict) else "that is not an object"
            raise ChatError(f'has a part of "content" {shown}; only {{"type": "text", "text": ...}} is supported')
        ignored.update(f"content.{key}" for key, value in part.items() if key not in ("type", "text") and value is not None)
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(message: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the calls with their arguments as objects; OpenAI writes these as JSON. None without calls."""
    calls = message.get("tool_calls")
    if not calls:
        return None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ChatError('has "tool_calls" that are not a list of objects')
    parsed = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatError('has a tool call without the "name" of its function')
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"has a call of {function['name']} whose arguments are")
        if not isinstance(arguments, dict):
            raise ChatError(f"has a call of {function['name']} whose arguments are not an object")
        whole = {**function, "arguments": arguments}
        parsed.append({**call, "function": whole} if "function" in call else whole)
    return parsed


def _parsed(text: str, subject: str) -> Any:
    """Parse JSON within a text."""
    try:
        return parse(text.encode())
    except BadLine as error:
        raise ChatError(f"{subject} JSON that cannot be used: {error}") from None


def _is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer that its weight does not exclude."""
    weights = {key: message[key] for key in WEIGHT_KEYS if message.get(key) is not None}
    for key, weight in weights.items():
        if not isinstance(weight, bool | int | float) or weight not in (0, 1):
            raise ChatError(f'has "{key}": {json.dumps(weight)}; only 0 and 1 are supported')
        if weight and message["role"] != "assistant":
            raise ChatError(f'has "{key}": {json.dumps(weight)} and the role {message["role"]}; only answers of the assistant are learned')
    return message["role"] == "assistant" and all(weights.values())


def _check_order(messages: Sequence[Mapping[str, Any]], *, answered: bool) -> None:
    """Refuse an order of roles other than that of chat_of."""
    before, expected = "the begin", ["system", "developer", "user"]
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in expected:
            wanted = " or ".join(name for name in expected if name != "developer")
            hint = "; data.instructions.repair=true repairs such chats" if role in ("assistant", "user") and answered else ""
            raise ChatError(f"message {number} has the role {role}; after {before} comes {wanted}{hint}")
        if role == "assistant":
            before, expected = ("an answer with tool_calls", ["tool"]) if message.get("tool_calls") else ("an answer", ["user"])
        elif role == "tool":
            before, expected = "a result of a tool", ["tool", "assistant"]
        else:
            before, expected = (f"a {role} message", ["assistant"] if role == "user" else ["user"])
    if answered and role != "assistant":
        raise ChatError(f"has no answer at its end: the last message has the role {role}")
    if not answered and role not in ("user", "tool"):
        raise ChatError(f"ends with the role {role}; a prompt ends with a message of the user or of a tool")


def _variables(fields: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the variables of the template that a record sets."""
    variables: dict[str, Any] = {}
    for key in ("tools", "documents"):
        value = fields.get(key)
        value = _parsed(value, f'has "{key}" with') if isinstance(value, str) and value else value
        if not value:
            continue
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ChatError(f'"{key}" must be a list of objects')
        if key not in names:
            raise ChatError(f'has "{key}", which the chat template does not show')
        variables[key] = value
    more = fields.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise ChatError('"chat_template_kwargs" must be an object')
    for key in more:
        if key in ("messages", "add_generation_prompt", "tools", "documents"):
            raise ChatError(f'"chat_template_kwargs" must not set "{key}"')
        if key not in names:
            raise ChatError(f'"chat_template_kwargs" sets "{key}", which the chat template does not read')
    return {**more, **variables}
