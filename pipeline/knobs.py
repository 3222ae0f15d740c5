"""Configuration fields that carry their own documentation and legal range."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import Violation


@dataclass(frozen=True)
class Knob:
    """What is known of one configuration field: its meaning, unit and legal range; of a list or dict, the dataclass of its items."""

    meaning: str
    unit: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    item: type | None = None

    def rule(self) -> str:
        """The legal range in words, empty when anything of the field's type goes."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bounds = [(self.at_least, "at least"), (self.above, "above"), (self.at_most, "at most")]
        return " and ".join(f"{word} {bound:g}" for bound, word in bounds if bound is not None)

    def admits(self, value: Any) -> bool:
        """Whether the value lies in the legal range; None (not set) always does."""
        if value is None:
            return True
        if self.choices:
            return value in self.choices
        return not (
            (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.at_most is not None and value > self.at_most)
        )


def knob(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    item: type | None = None,
) -> Any:
    """A dataclass field with its meaning, unit and legal range."""
    metadata = {"knob": Knob(meaning, unit, at_least, above, at_most, choices, item)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Knob, Any]]:
    """Every (dotted key, knob, value) of a tree of dataclasses (instances), depth first."""
    for item in dataclasses.fields(node):
        key, value = f"{prefix}{item.name}", getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{key}.")
        elif "knob" in item.metadata:
            yield key, item.metadata["knob"], value
            if item.metadata["knob"].item:
                for name, part in value.items() if isinstance(value, dict) else enumerate(value):
                    yield from walk(part, f"{key}.{name}.")


def range_violations(node: Any, prefix: str = "") -> list[Violation]:
    """The fields of a tree of dataclasses whose value is outside the legal range."""
    return [
        Violation(key, value, f"must be {knob.rule()}", f"set {key} to a value that is {knob.rule()} ({knob.meaning})")
        for key, knob, value in walk(node, prefix)
        if not knob.admits(value)
    ]
