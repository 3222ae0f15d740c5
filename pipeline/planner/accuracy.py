"""Ranges of planned times and memory: the factors within which most runs are that the planner was not fitted to."""

from __future__ import annotations

from pipeline.config.schema import RunConfig

#: Share of unseen runs in the ranges.
COVERED = 0.8
#: The measured time of 80 % of the runs of a publication that is left out of the fit is between the planned time divided by this factor and
#: multiplied by it; without measured runs of the site, and with one to three (cluster.correction). From tools/plan_score --leave-out.
TIME, CORRECTED_TIME = 1.25, 1.2
#: The same for memory, from the runs of two publications, the only ones that print theirs (tools/plan_score).
MEMORY = 1.2


def time_factor(config: RunConfig) -> float:
    """Return the factor of the range of a planned time."""
    return TIME if config.cluster.correction is None else CORRECTED_TIME


def time_range(seconds: float, config: RunConfig) -> tuple[float, float]:
    """Return the range of a planned time, in its unit."""
    factor = time_factor(config)
    return seconds / factor, seconds * factor


def memory_range(size: float) -> tuple[float, float]:
    """Return the range of a planned memory, in its unit."""
    return size / MEMORY, size * MEMORY


def factors_text(config: RunConfig) -> str:
    """Return a sentence about the ranges of all times and memory of a table."""
    time, memory = (f"{1 / factor:.2f} to {factor:.2f} x" for factor in (time_factor(config), MEMORY))
    return f"ranges that contain {COVERED:.0%} of unseen runs: {time} each time, {memory} the memory"
