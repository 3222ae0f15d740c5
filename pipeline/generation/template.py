"""Prompts from a Jinja template: the fields of a line, and examples that precede its question (few-shot, Brown et al. 2020)."""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.common import json_lines
from pipeline.common.errors import UserError
from pipeline.common.json_lines import BadLine
from pipeline.config.stages import Generate

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
        path: the template.
        examples: JSON lines with the fields of examples; None without.
        count: examples of a prompt.
        seed: of their choice.

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
            number: of the line, from 1.
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
    found = []
    for number, line in enumerate(_read("stage.examples", path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json_lines.parse(line.encode())
            if not isinstance(fields, dict):
                raise BadLine("is not an object")
        except BadLine as error:
            raise UserError.of("stage.examples", path, f"line {number} {error}", "correct or remove this line") from error
        found.append(fields)
    return found
