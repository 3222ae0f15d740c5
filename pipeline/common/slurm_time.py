"""Times in Slurm's format."""

from __future__ import annotations

import math
import re


def is_limit(time: str) -> bool:
    """Whether a text is a time limit: days-hours[:minutes[:seconds]], [hours:]minutes:seconds, or UNLIMITED. A plain number is not."""
    return re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2}|UNLIMITED", time) is not None


def seconds(time: str) -> float:
    """Return a time of Slurm in seconds: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]], or UNLIMITED."""
    if (found := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)) is None:
        return math.inf
    days, first, second, third = (int(part or 0) for part in found.groups())
    if found[1] or found[4]:  # the first number is hours
        return ((days * 24 + first) * 60 + second) * 60 + third
    return first * 60 + second
