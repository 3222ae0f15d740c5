"""Layers of another kind at a fixed interval: the layers without positions of SmolLM3, the global layers of Gemma 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.models.adapter import refusal


def is_marked(layer: int, interval: int) -> bool:
    """Whether a layer, counted from 0, is the last one of an interval."""
    return (layer + 1) % interval == 0


def marked(layers: int, interval: int) -> list[bool]:
    """Return for each layer whether it is the last one of an interval."""
    return [is_marked(layer, interval) for layer in range(layers)]


def interval_of(key: str, values: Sequence[Any], special: Any, stated: int) -> int:
    """Return the interval at which a list with an entry per layer has the entry `special`.

    Args:
        key: key of config.json.
        values: its value.
        special: the entry of the layers at the interval.
        stated: the interval that config.json states, which is preferred if it is true of the list: a list may fit several.

    Raises:
        UserError: the list does not follow an interval.
    """
    if not isinstance(stated, int) or isinstance(stated, bool) or stated < 1:
        raise refusal(key, list(values), f"comes with the interval {stated}, which must be an integer of at least 1", "fix config.json")
    found = [value == special for value in values]
    first = found.index(True) + 1 if any(found) else len(found) + 1
    for interval in (stated, first):
        if found == marked(len(found), interval):
            return interval
    raise refusal(key, list(values), f"does not have {special} at a fixed interval of layers, which this family requires")
