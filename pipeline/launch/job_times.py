"""Times of the jobs of a chain: what their run, an earlier job or the plan says where the user names none."""

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
from pipeline.report import run as runs

if TYPE_CHECKING:
    from pipeline.launch.stage_chain import Link


def proposals(links: list[Link], run_dir: Path) -> Iterator[str]:
    """Yield a sentence for each job of a chain that could ask for less than half of its time, or needs more of it."""
    for link in links:
        trains, name, given = link.stage in TRAINING_STAGES, in_use.job_name(link.stage, run_dir), slurm_seconds(link.cluster.time)
        seconds, source = _training(link) if trains else (_earlier(name, link.cluster.nodes), "an earlier job")
        if not seconds or any(key_of(word) == "cluster.time" for word in link.arguments):
            continue
        about, time = f"{link.stage} takes about {shown(seconds)} by {source}", shown(math.ceil(max(1.25 * seconds, 600) / 900) * 900)
        if slurm_seconds(time) < given / 2:
            yield f"{about}, and asks for {link.cluster.time}: 'submit.overrides.{link.stage}=[\"cluster.time={time}\"]' may start earlier"
        elif seconds > given:
            jobs = f"{math.ceil(seconds / given)} jobs of {link.cluster.time}"
            yield f"{about}: {jobs}" if trains else f"{about}, and asks for {link.cluster.time}: set cluster.time, or submit it again"


def shown(seconds: float) -> str:
    """Return a time as Slurm reads it."""
    days, rest = divmod(round(seconds), 86400)
    return f"{days}-{timedelta(seconds=rest)}" if days else str(timedelta(seconds=rest))


def _training(link: Link) -> tuple[float, str]:
    """Seconds of the steps that are left, by the last steps of the run or by the plan; 0 if neither is known."""
    run, config = runs.read(Path(link.config.run_dir)), link.config
    if run.seconds_per_step and run.nodes == link.cluster.nodes:
        step, source = run.seconds_per_step, "its last steps"
    elif link.stage != "pretrain" or config.training.phases or config.cluster.hardware is None:
        return 0.0, ""
    else:
        from pipeline.planner import plan  # loads torch

        step, source = plan.plan(config, link.world_size, plan.hardware_of(config)).estimate.step_time, "the plan"
    return max(config.training.steps - run.step, 0) * step, f"{source} ({step:.3g} s each)"


def _earlier(name: str, nodes: int) -> float:
    """Seconds of the longest complete job of this name and size in the last 90 days; 0 without accounting."""
    try:  # without an end, the states are those of jobs that end at this moment
        words = ["sacct", "-X", "-n", "-P", "-o", "NNodes,ElapsedRaw", "-s", "CD", "-S", "now-90days", "-E", "now", "--name", name]
        lines = slurm.command(words, timeout=15).split()
    except slurm.SlurmError:
        return 0.0
    return max((float(line.partition("|")[2] or 0) for line in lines if line.startswith(f"{nodes}|")), default=0.0)
