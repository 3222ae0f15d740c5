"""Rules of the group clean."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.common import languages
from pipeline.common.condition import Condition
from pipeline.common.errors import Violation
from pipeline.config.cleaning import PERSONAL_KINDS, STEPS, CleanConfig


def violations(clean: CleanConfig) -> Iterator[Violation]:
    """Yield the violated rules of the lists of steps and of kinds of personal data, which a knob cannot check."""
    for key, names, known in (("clean.steps", clean.steps, STEPS), ("clean.personal.kinds", clean.personal.kinds, PERSONAL_KINDS)):
        for name in names:
            if name not in known:
                yield Violation(key, name, "is unknown", "choose " + ", ".join(known))
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Violation(key, name, "is listed twice", "remove one")
    has_model = clean.language.model is not None  # its languages are checked when the stage has read it
    for code in () if has_model else clean.language.keep:
        yield from _language("clean.language.keep", code)
    for name in ("length", "gopher", "c4", "fineweb", "repetition"):
        yield from _by_language(getattr(clean, name), name, has_model)
    if "score" in clean.steps and (clean.score.model is None) == (clean.score.command is None):
        rule = "is set beside clean.score.command" if clean.score.command else "is not set, and clean.steps has score"
        yield Violation("clean.score.model", clean.score.model, rule, "name a classifier, or a command in clean.score.command")
    yield from _command(clean.score.command, clean.score.label)
    if "fields" in clean.steps:
        yield from condition_violations("clean.fields.keep", clean.fields.keep)
    least, most = clean.contamination.least_words, clean.contamination.words
    if least > most:
        yield Violation(
            "clean.contamination.least_words", least, f"is above clean.contamination.words={most}", "lower it, or raise the other"
        )
    for key, values, count in (("top_ngrams", clean.repetition.top_ngrams, 3), ("long_ngrams", clean.repetition.long_ngrams, 6)):
        if len(values) != count:
            yield Violation(
                f"clean.repetition.{key}", values, f"has {len(values)} entries, not {count}", f"give {count} numbers from 0 to 1"
            )


def _command(command: str | None, label: str) -> Iterator[Violation]:
    """Why a command of clean.score cannot be started."""
    if command is None:
        return
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield Violation("clean.score.command", command, f"is no command: {error}", "quote it as in a shell")
        return
    if not words or any(re.fullmatch(r"\|\|?|&&?|;|\d?[<>].*", word) for word in words):
        rule = "is for a shell, and none runs it" if words else "is empty"
        yield Violation("clean.score.command", command, rule, "name a program and its arguments, or write \"bash -c '...'\"")
    if label:
        yield Violation("clean.score.label", label, "is not read with clean.score.command", "remove it")


def condition_violations(key: str, text: str) -> Iterator[Violation]:
    """Yield why a text is no condition on fields, and languages whose texts have other labels."""
    try:
        compared = Condition(text).compared_with("lang")
    except ValueError as error:
        yield Violation(key, text, str(error), "write one such as score > 0.5 and lang in ['de', 'fr']")
        return
    for code in compared:
        if (label := languages.normalized(code)) != code:
            yield Violation(key, text, f"compares lang with {code}, and no text has this label", f"write {label}")


def _language(key: str, code: str) -> Iterator[Violation]:
    """A code that names no language, or only a part of one, for the detector."""
    if not languages.covered(code):
        known = languages.label(code)
        part = f"names a part of {known} that the detector does not distinguish"
        rule = part if known else "is no code of a language that the detector knows"
        yield Violation(key, code, rule, f"the nearest is {languages.nearest(code)}; pipeline/common/languages.py lists all")


def _by_language(step: Any, name: str, has_model: bool) -> Iterator[Violation]:
    """The keys and values of `clean.STEP.by_language`, which a knob cannot check."""
    knobs = {field.name: field.metadata["knob"] for field in dataclasses.fields(step) if field.name != "by_language"}
    for language, values in step.by_language.items():
        key = f"clean.{name}.by_language.{language}"
        yield from () if has_model else _language(key, language)
        if not isinstance(values, Mapping):
            yield Violation(key, values, "is not a mapping of keys to values", f"write {{{language}: {{KEY: VALUE}}}}")
            continue
        for wanted, value in values.items():
            if wanted not in knobs:
                yield Violation(f"{key}.{wanted}", value, "is unknown", "choose " + ", ".join(knobs))
                continue
            general = getattr(step, wanted)
            count = len(general) if isinstance(general, Sequence) else 0
            numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            if len(numbers) != max(1, count) or not all(
                type(number) in (int, float) and not knobs[wanted].violated(number) for number in numbers
            ):
                rule = " ".join([f"{count} numbers" if count else "a number", knobs[wanted].rule()]).strip()
                yield Violation(f"{key}.{wanted}", value, f"must be {rule}", f"set it to a legal value ({knobs[wanted].meaning})")
