"""Configuration fields with documentation and legal range."""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.common.errors import Violation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


@dataclass(frozen=True)
class Knob:
    """The documentation of a configuration field: meaning, unit, legal range, the dataclass of the items, whether line breaks are legal."""

    meaning: str
    unit: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    item: type | None = None
    multiline: bool = False

    def rule(self) -> str:
        """Return the legal range as text, empty if every value of the type is legal."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bounds = [(self.at_least, "at least"), (self.above, "above"), (self.at_most, "at most")]
        # With all digits: 0.9999999 is not 1.
        return " and ".join(f"{word} {bound:.10g}" for bound, word in bounds if bound is not None)

    def violated(self, value: Any) -> str:
        """Return the rule that a value breaks, empty if it is legal. None (unset) is always legal."""
        if isinstance(value, list | dict):
            parts = value.values() if isinstance(value, dict) else value
            return next((rule for part in parts if (rule := self.violated(part))), "")
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if isinstance(value, str) and any(unicodedata.category(c) == "Cc" and not (self.multiline and c in "\n\t") for c in value):
            return "must not contain control characters"
        illegal = value is not None and (
            (self.choices and value not in self.choices)
            or (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.at_most is not None and value > self.at_most)
        )
        return f"must be {self.rule()}" if illegal else ""


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
    multiline: bool = False,
) -> Any:
    """Create a dataclass field with meaning, unit and legal range."""
    metadata = {"knob": Knob(meaning, unit, at_least, above, at_most, choices, item, multiline)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of nested dataclasses with other values.

    Args:
        config: frozen, as every configuration.
        values: dotted key -> value, such as {"training.steps": 6, "model": small}.
    """
    fields = {key: value for key, value in values.items() if "." not in key}
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        group, _, name = key.partition(".")
        if name:
            nested.setdefault(group, {})[name] = value
    for group, parts in nested.items():
        fields[group] = changed(fields.get(group, getattr(config, group)), parts)
    return dataclasses.replace(config, **fields)


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Knob, Any]]:
    """Yield (dotted key, knob, value) for every field of nested dataclass instances, depth first."""
    for item in dataclasses.fields(node):
        key, value = f"{prefix}{item.name}", getattr(node, item.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{key}.")
        elif "knob" in item.metadata:
            yield key, item.metadata["knob"], value
            if item.metadata["knob"].item:
                for name, part in value.items() if isinstance(value, dict) else enumerate(value):
                    yield from walk(part, f"{key}.{name}.")


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value below a key, of nested mappings; an empty one is a value."""
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from leaves(f"{key}.{name}" if key else str(name), part)
    else:
        yield key, value


def range_violations(node: Any, prefix: str = "") -> list[Violation]:
    """Return a violation for every field of nested dataclasses whose value is outside its legal range."""
    return [
        Violation(key, value if str(value).isprintable() else repr(value), rule, f"set {key} ({knob.meaning}) to a legal value")
        for key, knob, value in walk(node, prefix)
        if (rule := knob.violated(value))
    ]
