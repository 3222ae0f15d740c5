"""The memory of this machine that can be allocated."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> float:
    """Return the memory of this machine that can be allocated, with its swap space, within --mem of its Slurm job."""
    lines = (line.partition(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    kilobytes = {name: float(value.split()[0]) for name, _, value in lines}
    job = float(os.environ.get("SLURM_MEM_PER_NODE") or "inf")  # MB; of a job with --mem
    return min(1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0.0)), 1024**2 * (job or float("inf")))
