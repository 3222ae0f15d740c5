"""Ranges of planned times and memory: the factors within which most runs are that the planner was not fitted to."""

from __future__ import annotations

from pipeline.config.schema import RunConfig

#: Share of the runs of publications that are left out of the fit in the ranges.
COVERED = 0.8
#: Measured over planned time between which they are, without measured runs of the site, and with one to three (cluster.correction): the
#: factors of tools/study/README.md. Most runs beyond them are slower: of publications by users of GPUs, predicted from those of
#: their vendor, a tenth takes more than 1.5 times the planned time, hence the upper bound.
TIME, CORRECTED_TIME = (0.78, 1.5), (0.82, 1.22)
#: The same for memory: a tenth each is outside of the 112 runs of the two publications that print theirs (tools/plan_score), which count
#: the same. Rehearsals of this engine with an allocator that keeps what it cannot join reserve up to 1.4 x the planned memory.
MEMORY = (0.91, 1.4)


def time_factors(config: RunConfig) -> tuple[float, float]:
    """Return the factors of the range of a planned time."""
    return TIME if config.cluster.correction is None else CORRECTED_TIME


def time_range(seconds: float, config: RunConfig) -> tuple[float, float]:
    """Return the range of a planned time, in its unit."""
    low, high = time_factors(config)
    return seconds * low, seconds * high


def memory_range(size: float) -> tuple[float, float]:
    """Return the range of a planned memory, in its unit."""
    return size * MEMORY[0], size * MEMORY[1]


def factors_text(config: RunConfig) -> str:
    """Return a sentence about the ranges of all times and memory of a table."""
    time, memory = (f"{low:.2f} to {high:.2f} x" for low, high in (time_factors(config), MEMORY))
    return f"ranges that contain {COVERED:.0%} of unseen runs: {time} each time, {memory} the memory"
