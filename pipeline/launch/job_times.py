"""Times of the jobs of a chain: what earlier jobs, or the plan, say where the user names none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.common.ranks import slurm_seconds
from pipeline.config.command_line import key_of
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch import in_use, slurm

if TYPE_CHECKING:
    from pipeline.launch.stage_chain import Link

#: A proposal is this many times what was measured, or planned, and at least so many seconds, in whole quarters of an hour.
_ROOM, _LEAST, _STEP = 1.25, 600.0, 900


def proposals(links: list[Link], run_dir: Path) -> Iterator[str]:
    """Yield a sentence for each job that could ask for less than half of its time, or needs more of it.

    Args:
        run_dir: of the chain.
    """
    for link in links:
        if any(key_of(word) == "cluster.time" for word in link.arguments):
            continue
        training = link.stage in TRAINING_STAGES
        name = in_use.job_name(link.stage, run_dir)
        seconds, source = _training(link) if training else (_earlier(name, link.cluster.nodes), "an earlier job")
        room, given = max(seconds * _ROOM, _LEAST), slurm_seconds(link.cluster.time)
        if not seconds:
            continue
        about = f"{link.stage} takes about {shown(seconds)} by {source}"
        if room < given / 2:
            time = shown(math.ceil(room / _STEP) * _STEP)
            yield f"{about}, and asks for {link.cluster.time}: 'submit.overrides.{link.stage}=[\"cluster.time={time}\"]' may start earlier"
        elif seconds > given and training:
            yield f"{about}: {math.ceil(seconds / given)} jobs of {link.cluster.time}"
        elif seconds > given:
            yield f"{about}, and asks for {link.cluster.time}: set cluster.time, or submit it again, which continues"


def shown(seconds: float) -> str:
    """Return a time as Slurm writes it."""
    days, rest = divmod(round(seconds), 86400)
    return f"{days}-{timedelta(seconds=rest)}" if days else str(timedelta(seconds=rest))


def _training(link: Link) -> tuple[float, str]:
    """Seconds of the steps that are left, by the last steps of the run or by the plan; 0 if neither is known."""
    from pipeline.planner import memory_check  # loads torch
    from pipeline.report import run as runs

    run = runs.read(Path(link.config.run_dir))
    left = max(link.config.training.steps - (run.step or 0), 0)
    if run.seconds_per_step and run.nodes == link.cluster.nodes:
        return left * run.seconds_per_step, f"its last steps ({run.seconds_per_step:.3g} s each)"
    if link.stage != "pretrain" or link.config.training.phases or (plan := memory_check.planned(link.config, link.world_size)) is None:
        return 0.0, ""
    return left * plan.estimate.step_time, f"the plan ({plan.estimate.step_time:.3g} s a step)"


def _earlier(name: str, nodes: int) -> float:
    """Seconds of the longest complete job of this name and size in the last 90 days; 0 without accounting."""
    # without an end, the states are those of jobs that end at this moment
    words = ["sacct", "-X", "-n", "-P", "-o", "NNodes,ElapsedRaw", "-s", "CD", "-S", "now-90days", "-E", "now", "--name", name]
    try:
        lines = slurm.command(words, timeout=15).split()
    except slurm.SlurmError:
        return 0.0
    return max((float(line.partition("|")[2] or 0) for line in lines if line.startswith(f"{nodes}|")), default=0.0)
