"""The chat template of a Hugging Face tokenizer: messages -> text, and the parts of the text that the assistant wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.common.errors import UserError

#: Characters [first, last) of a rendered chat.
Span = tuple[int, int]
#: Keys of tokenizer_config.json with special tokens, which templates use.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Enclose the text of a `{% generation %}` block while a template is rendered: code points that are reserved for internal use.
_BEGIN, _END = "\ufdd0", "\ufdd1"


class ChatError(ValueError):
    """Messages that cannot be rendered; the message gives the reason."""


class _Generation(Extension):
    """The tag `{% generation %}`, with which templates of transformers enclose what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Render the body between marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class ChatTemplate:
    """A compiled template.

    Args:
        text: source of the template.
        variables: special tokens that the template may use.

    Raises:
        TemplateError: the source is not a template.
    """

    def __init__(self, text: str, variables: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise
        self.text, self._variables, self._template = text, variables, environment.from_string(text)
        self._marks_answers = "generation" in text and "endgeneration" in text

    def render(self, messages: Any, *, add_generation_prompt: bool) -> str:
        """Return the text of a chat.

        Args:
            messages: objects with "role" and "content".
            add_generation_prompt: end with what precedes an answer of the assistant.

        Raises:
            ChatError: the messages are not such a list, or the template refuses them.
        """
        return self._render(messages, add_generation_prompt=add_generation_prompt).replace(_BEGIN, "").replace(_END, "")

    def answers(self, messages: Any) -> tuple[str, list[Span]]:
        """Return the text of a chat, and the parts that the assistant writes, each with the token that ends it.

        They are the `{% generation %}` blocks of the template. In a template without such blocks, an answer is what follows the earlier
        messages and their generation prompt.

        Raises:
            ChatError: as render; or no message has the role assistant, or earlier messages are rendered differently in a longer chat.
        """
        whole = self._render(messages, add_generation_prompt=False)
        if not any(message.get("role") == "assistant" for message in messages):
            raise ChatError("has no answer: no message has the role assistant")
        if self._marks_answers:
            return _unmarked(whole)
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = self._render(messages[:number], add_generation_prompt=True) if number else ""
                after = self._render(messages[: number + 1], add_generation_prompt=False)
                if not whole.startswith(after) or not after.startswith(before):
                    rule = f"the chat template renders messages 1 to {number + 1} differently within the whole chat"
                    raise ChatError(f"{rule}; mark answers in it with {{% generation %}}, or split the chat")
                spans.append((len(before), len(after)))
        return whole, spans

    def _render(self, messages: Any, *, add_generation_prompt: bool) -> str:
        """As render, with the marks of answers."""
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise ChatError('"messages" must be a list of objects with "role" and "content"')
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._variables)
        except (TemplateError, TypeError, ValueError) as error:
            raise ChatError(f"the chat template fails: {error}") from error
        return text


def load(folder: Path) -> ChatTemplate | None:
    """Return the template of a tokenizer folder: chat_template.jinja, or that of tokenizer_config.json; None if it has none.

    Raises:
        UserError: the template cannot be compiled.
    """
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    text = settings.get("chat_template")
    if isinstance(text, list):  # several templates with names
        text = next((each["template"] for each in text if each["name"] == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        text = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if text is None:
        return None
    tokens = {name: settings[name] for name in _SPECIAL_TOKENS if settings.get(name)}
    variables = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    try:
        return ChatTemplate(text, variables)
    except TemplateError as error:
        rule = f"has a chat template that cannot be compiled: {error}"
        raise UserError.of("tokenizer.path", folder, rule, "correct chat_template.jinja or tokenizer_config.json") from error


def _raise(message: str) -> None:
    """A function of chat templates."""
    raise TemplateError(message)


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """Remove the marks, and return where they were."""
    text, spans = "", []
    for number, part in enumerate(marked.split(_BEGIN)):
        inside, end, outside = part.partition(_END) if number else ("", "", part)
        if number:
            if not end:
                raise ChatError("the chat template has a {% generation %} block within another one")
            spans.append((len(text), len(text) + len(inside)))
        text += inside + outside
    return text, spans
