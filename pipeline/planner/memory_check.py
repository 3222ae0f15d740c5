"""Refusal of a training job that will not fit in the memory of its GPUs, with the nearest layout that does."""

from __future__ import annotations

from operator import attrgetter

from pipeline.common.errors import Violation
from pipeline.config import phases
from pipeline.config.schema import RunConfig
from pipeline.planner.plan import JobPlan, hardware_of, plan
from pipeline.planner.search import CHOSEN, Choice, nearest


def planned(config: RunConfig, world_size: int) -> JobPlan | None:
    """Return the plan of a job; None if the cluster does not name its GPU (cluster.hardware)."""
    return None if config.cluster.hardware is None else plan(config, world_size, hardware_of(config))


def refused(config: RunConfig, world_size: int) -> Violation | None:
    """Return why a job is refused, for the first of its phases that does not fit; None as of `violation`."""
    refusals = (violation(job, size, planned(job, size)) for job, size in phases.alone(config, world_size))
    return next(filter(None, refusals), None)


def violation(config: RunConfig, world_size: int, result: JobPlan | None) -> Violation | None:
    """Return why a planned job is refused; None if it fits, its GPU is unknown, or cluster.check_memory is off."""
    if result is None or result.estimate.fits or not config.cluster.check_memory:
        return None
    choice = nearest(config, world_size, hardware_of(config))
    if choice is not None and choice.plan.estimate.fits:
        fix = f"the nearest layout that fits: {' '.join((*choice.settings, *restored(config, choice)))}"
    else:
        least = "" if choice is None else f" (the smallest layout needs {choice.plan.estimate.memory.total / 1e9:.1f} GB)"
        fix = f"no layout of {world_size:,} ranks fits{least}: use more nodes, or GPUs with more memory"
    needs, has = result.estimate.memory.total / 1e9, result.hardware.memory_gb
    rule = f"the planned job does not fit: it needs {needs:.1f} GB on a GPU of {has:.1f} GB"
    return Violation("cluster.hardware", config.cluster.hardware, rule, f"{fix}; or submit it anyway with cluster.check_memory=false")


def restored(config: RunConfig, choice: Choice) -> list[str]:
    """Return the settings of the configuration that a layout sets to their defaults, which its own settings do not name."""
    named = {word.partition("=")[0] for word in choice.settings}
    values = {key: [attrgetter(key)(job) for job in (config, choice.plan.config)] for key in CHOSEN if key not in named}
    return [f"{key}={'null' if new is None else new}" for key, (old, new) in values.items() if old != new]
