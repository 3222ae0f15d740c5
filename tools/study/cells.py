"""Cells of a row of published runs: numbers, and the step time that a row states (columns: tools/study/README.md)."""

from __future__ import annotations

import math
import re
from functools import partial

#: What tables write into cells that have no value.
EMPTY = ("", "-", "--", "?", "n/a", "na", "nan", "none", "null", "unknown", "not stated", "auto", "default")


class Contradiction(Exception):  # noqa: N818 - a property of a row
    """A row whose cells contradict each other, or that describes no run."""


def integer(row: dict[str, str], name: str, default: int, assumed: list[str]) -> int:
    """A whole number; an empty cell gives the default, which is noted."""
    value = number(row, name)
    if value is None:
        if default and name not in ("gpus_per_node", "year"):
            assumed.append(f"{name}={default}")
        return default
    if value == 0 and name in ("interleave", "ep", "cp"):  # not used
        return default
    if value != int(value) or value < 1:
        raise Contradiction(f"{name}={row[name]} is not a positive whole number")
    return int(value)


def number(row: dict[str, str], name: str) -> float | None:
    """A number, None for an empty cell."""
    text = row.get(name, "").strip().lower()
    if text in EMPTY:
        return None
    if name == "year" and (date := re.search(r"\b(?:19|20)\d\d", text)):
        return float(date[0])
    try:
        value = float(re.sub(r"(?<=\d)[_,](?=\d{3})", "", text))
    except ValueError as error:
        raise Contradiction(f"{name}={text} is not a number") from error
    if not math.isfinite(value) or value < 0:
        raise Contradiction(f"{name}={text} is not a positive number")
    return value


def text_of(row: dict[str, str], *names: str) -> str:
    """All cells, or those of some columns, as one text."""
    return " ".join(row.get(name, "") for name in names or row)


def flag(row: dict[str, str], name: str, default: bool, assumed: list[str]) -> bool:
    """A yes or no; an empty cell gives the default, which is noted."""
    text = row.get(name, "").strip().lower()
    if text in EMPTY:
        assumed.append(f"{name}={'y' if default else 'n'}")
        return default
    return text.startswith(("y", "t", "on", "1", "enable"))


def measured_step_time(row: dict[str, str]) -> float | None:
    """Return the published step time in seconds, derived from throughput if it is not printed; None if neither is there.

    FLOPs are only used where their convention is stated to be that of Narayanan et al. 2021 (SC21, equation 3).
    """
    cell = partial(number, row)
    if time := cell("step_time_s"):
        return time
    batch, sequence, gpus = cell("global_batch"), cell("seq_len"), cell("gpus")
    if not (batch and sequence and gpus):
        return None
    if tokens := cell("tokens_per_s_per_gpu"):
        return batch * sequence / (tokens * gpus)
    rate, layers, hidden, vocabulary = (cell(name) for name in ("tflops_per_gpu", "layers", "hidden", "vocab"))
    if rate and layers and hidden and vocabulary and "96bslh" in row.get("tflops_convention", "").lower():
        flops = 96 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
        return flops / (rate * 1e12 * gpus)
    return None
