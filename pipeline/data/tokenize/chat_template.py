"""The chat template of a Hugging Face tokenizer: messages -> text, and the parts of the text that the assistant wrote.

Templates are rendered as by transformers (utils/chat_template_utils.py), which is not required.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.common.atomic_files import atomic_folder
from pipeline.common.errors import UserError
from pipeline.config.data import TokenizerConfig
from pipeline.data.tokenize.chat_encoding import ChatEncoder
from pipeline.data.tokenize.chats import Chat, ChatError
from pipeline.data.tokenize.tokenizer import load as load_tokenizer

#: Name of a shipped template -> the special tokens that it needs.
SHIPPED = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>"),
    "glm": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    "gpt_oss": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "plain": (),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
}
#: The shipped templates, for messages.
NAMES = f"{', '.join(list(SHIPPED)[:-1])} or {list(SHIPPED)[-1]}"
#: Name of a template in a tokenizer folder or a run directory.
FILE = "chat_template.jinja"
#: Files of a tokenizer; the last ones name its special tokens.
_FILES = ("tokenizer*.json", "*tokens*.json", "*.model", "vocab*", "merges.txt", "config.json", "generation_config.json")
_FOLDER = Path(__file__).with_name("chat_templates")
#: Characters [first, last) of a rendered chat.
Span = tuple[int, int]
#: Keys of tokenizer_config.json with special tokens, which templates use.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Enclose the text of a `{% generation %}` block while a template is rendered: code points that are reserved for internal use.
_BEGIN, _END = "\ufdd0", "\ufdd1"
#: Follows the last message where it is to be continued.
_LAST = "\ufdd2"


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
        variables: special tokens that the template may use.

    Attributes:
        names: every variable, attribute, key and string constant of the template: what it reads has a name among them.
        is_dated: whether it writes the current date, so that another day gives other tokens.

    Raises:
        TemplateError: the source is not a template.
    """

    def __init__(self, text: str, variables: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self.text, self._variables, self._template = text, variables, environment.from_string(text)
        tree = environment.parse(text)
        self._marks_answers = any(node.name == "_mark" for node in tree.find_all(nodes.ExtensionAttribute))
        names = {node.name for node in tree.find_all(nodes.Name)} | {node.attr for node in tree.find_all(nodes.Getattr)}
        self.names = frozenset(names | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)})
        self.is_dated = "strftime_now" in self.names

    def prompt(self, chat: Chat) -> tuple[str, list[int]]:
        """Return the text of a chat, ending with what precedes an answer of the assistant, and where the earlier answers begin.

        Raises:
            ChatError: the template fails.
        """
        text = self._render(chat, chat.messages, add_generation_prompt=True)
        if self._marks_answers:
            text, spans = _unmarked(text)
            return text, [first for first, _ in spans]
        try:
            return text, [first for _, (first, _) in self._spans(chat, text)]
        except ChatError:  # a template that shortens earlier answers: training refuses it
            return text, []

    def text_of(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the text of messages that are not checked; without a generation prompt it ends with the content of the last one.

        Raises:
            ChatError: the template fails, or does not show the last message.
        """
        if not add_generation_prompt:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{_LAST} "}]
        text = self._render(Chat(messages, []), messages, add_generation_prompt=add_generation_prompt).replace(_BEGIN, "").replace(_END, "")
        if add_generation_prompt:
            return text
        before, mark, after = text.rpartition(_LAST)
        if not mark:
            raise ChatError("the chat template does not show the last message")
        return before if after.startswith(" ") else before.rstrip()  # a template that strips messages

    def answers(self, chat: Chat) -> tuple[str, list[Span], list[Span]]:
        """Return the text of a chat, and the parts that the assistant writes, each with the token that ends it: all, and those to learn.

        They are the `{% generation %}` blocks of the template. In a template without such blocks, an answer is what follows the earlier
        messages and their generation prompt.

        Raises:
            ChatError: as prompt; or earlier messages are rendered differently in a longer chat.
        """
        text = self._render(chat, chat.messages, add_generation_prompt=False)
        numbers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if self._marks_answers:
            text, spans = _unmarked(text)
            if all(chat.learned[number] for number in numbers):
                return text, spans, spans
            if len(spans) != len(numbers):
                rule = f"has {len(spans)} {{% generation %}} blocks for {len(numbers)} answers"
                raise ChatError(f"the chat template {rule}, so the answers with weight 0 are not known")
            return text, spans, [span for number, span in zip(numbers, spans, strict=True) if chat.learned[number]]
        numbered = list(self._spans(chat, text))
        return text, [span for _, span in numbered], [span for number, span in numbered if chat.learned[number]]

    def _spans(self, chat: Chat, whole: str) -> list[tuple[int, Span]]:
        """Return the number and the part of every answer, in a template without marks."""
        spans = []
        for number, message in enumerate(chat.messages):
            if message["role"] == "assistant":
                before = self._render(chat, chat.messages[:number], add_generation_prompt=True) if number else ""
                after = self._render(chat, chat.messages[: number + 1], add_generation_prompt=False)
                if not whole.startswith(after) or not after.startswith(before):
                    rule = f"the chat template renders messages 1 to {number + 1} differently within the whole chat"
                    raise ChatError(f"{rule}; set tokenizer.chat_template={NAMES}, mark answers with {{% generation %}}, or split the chat")
                spans.append((number, (len(before), len(after))))
        return spans

    def _render(self, chat: Chat, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the text with the marks of answers.

        A template may print the content of an answer without text as "None", or fail to add it to a text: such a template gets "".
        """
        if all(message["content"] is not None for message in messages):
            return self._rendered(chat, messages, add_generation_prompt)
        filled = [{**message, "content": message["content"] or ""} for message in messages]
        try:
            text = self._rendered(chat, messages, add_generation_prompt)
        except ChatError:
            return self._rendered(chat, filled, add_generation_prompt)
        try:
            without = self._rendered(chat, filled, add_generation_prompt)
        except ChatError:
            return text
        return without if text.count("None") > without.count("None") else text

    def _rendered(self, chat: Chat, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        """Render once."""
        variables = {"tools": None, "documents": None, **self._variables, **chat.variables}
        try:
            text: str = self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ChatError(f"the chat template fails: {error}") from error
        return text


def load(folder: Path, named: str | None = None, end_of_document: str | None = None) -> ChatTemplate | None:
    """Return a chat template; None without one.

    Args:
        folder: of the tokenizer, with the template unless `named` is set: chat_template.jinja, or that of tokenizer_config.json.
        named: tokenizer.chat_template: the name of a shipped template, or a file.
        end_of_document: eos_token of a tokenizer whose tokenizer_config.json names none, as in its export.

    Raises:
        UserError: the template cannot be read or compiled, or the tokenizer lacks a special token that the shipped template needs.
    """
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    text = settings.get("chat_template")
    if isinstance(text, list):  # several templates with names
        text = next((entry["template"] for entry in text if entry["name"] == "default"), None)
    if (folder / FILE).is_file():
        text = (folder / FILE).read_text(encoding="utf-8")
    key, where, fix = "tokenizer.path", str(folder), f"correct {FILE} or tokenizer_config.json, or set tokenizer.chat_template"
    if named is not None:
        key, where, fix, text = "tokenizer.chat_template", named, f"set it to {NAMES}, or to a Jinja file", _named(folder, named)
    if text is None:
        return None
    tokens = {name: settings[name] for name in _SPECIAL_TOKENS if settings.get(name)}
    variables = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    if end_of_document is not None:
        variables.setdefault("eos_token", end_of_document)
    try:
        return ChatTemplate(text, variables)
    except TemplateError as error:
        raise UserError.of(key, where, f"has a chat template that cannot be compiled: {error}", fix) from error


def _named(folder: Path, named: str) -> str:
    """Return the text of the template that tokenizer.chat_template names; raises as load."""
    if named not in SHIPPED:
        try:
            return Path(named).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            rule = f"is neither the name of a template nor a file that can be read: {reason}"
            raise UserError.of("tokenizer.chat_template", named, rule, f"set it to {NAMES}, or to a Jinja file") from error
    known = [token.content for token in load_tokenizer(folder).get_added_tokens_decoder().values()]
    if missing := [token for token in SHIPPED[named] if token not in known]:
        rule = f"needs the special tokens {', '.join(missing)}, which the tokenizer of {folder} lacks"
        wanted = ",".join(f'"{token}"' for token in SHIPPED[named])
        fix = f"choose plain, which needs none, or train the tokenizer with 'tokenizer.special_tokens=[{wanted}]'"
        raise UserError.of("tokenizer.chat_template", named, rule, fix)
    return (_FOLDER / f"{named}.jinja").read_text(encoding="utf-8")


def of(tokenizer: TokenizerConfig) -> ChatTemplate | None:
    """Return the template that the settings choose, None without one; raises as load."""
    return load(Path(tokenizer.path), tokenizer.chat_template, tokenizer.end_of_document)


def store(template: ChatTemplate, source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer with another template; not the weights that may be beside them."""
    with atomic_folder(folder) as partial:
        for path in (path for pattern in _FILES for path in source.glob(pattern) if path.is_file()):
            shutil.copyfile(path, partial / path.name)
        settings = partial / "tokenizer_config.json"
        if settings.is_file() and "chat_template" in (content := json.loads(settings.read_text(encoding="utf-8"))):
            del content["chat_template"]
            settings.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (partial / FILE).write_text(template.text, encoding="utf-8")


def end_of_turn(template: ChatTemplate, encoder: ChatEncoder) -> int | None:
    """Return the special token with which an answer ends in a template, or the one that follows it; None if neither is one."""
    turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for turns in (2, 1):  # some templates shorten earlier answers
        try:
            text, _, ((first, last), *_) = template.answers(Chat(turn * turns, [False, True] * turns))
            content = text.rindex("y", first, last)
        except (ChatError, ValueError):  # a template that refuses such a chat, or has no answer in it
            continue
        ((tokens, places),) = encoder.encode([(text, [first])])
        pieces = list(zip(tokens, places.tolist(), strict=True))
        inside = (token for token, (begin, end) in pieces if content < begin and end <= last)
        if (turn_end := next((token for token in inside if token in encoder.special), None)) is not None:
            return turn_end
        following = [token for token, (begin, _) in pieces if begin == last]
        if following and following[0] in encoder.special:
            return following[0]
    return None


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """A filter of chat templates, without the HTML escapes of jinja2's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    """A function of chat templates."""
    raise TemplateError(message)


def _now(form: str) -> str:
    """A function of chat templates: the current date."""
    return datetime.now().strftime(form)


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
