"""Measurements and report lines that tools/bench_train and tools/bench_data share."""

from __future__ import annotations

import math
from pathlib import Path


def resident_bytes(field: str) -> int:
    """Return the resident memory of this process in bytes, from /proc: VmRSS is the current value, VmHWM the peak."""
    line = next(line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def verdict(value: float, at_least: float = 0.0, at_most: float = math.inf) -> str:
    """Return the target of a measured value, and whether the value meets it. A target has one of the two bounds."""
    bound = f"at least {at_least:,g}" if at_least else f"at most {at_most:,g}"
    return f"target {bound}: {'met' if at_least <= value <= at_most else 'MISSED'}"
