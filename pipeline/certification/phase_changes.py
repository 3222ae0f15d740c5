"""Part "phases": a small run changes from one phase of training.phases to another, in their layouts and in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.certification.comparison import Outcome
from pipeline.certification.conditioning import LARGEST_RATE, in_precision
from pipeline.certification.layout_training import begin, train_in_layout
from pipeline.certification.ranks_work import in_folder
from pipeline.certification.shrink import Shrunk
from pipeline.certification.state import Saving, saved_steps
from pipeline.common import knobs
from pipeline.config import phases
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig

#: The file with the outcome of the first phase.
FIRST = "first"


def small_run(planned: tuple[RunConfig, RunConfig], small: tuple[Shrunk, Shrunk]) -> RunConfig | None:
    """Return a run that changes from one small phase to another after saved_steps, in fp32; None if no small model suits both layouts.

    Args:
        planned: both phases.
        small: their small versions. The run has the model of one of them, and a longer sequence where the planned phase has.
    """
    lengths = [job.training.sequence_length for job in planned]
    rate = min(1.0, LARGEST_RATE / max(job.config.optimizer.lr for job in small))  # both rates are changed by one factor
    for chosen in reversed(small):
        configs = []
        for job, longer in zip(small, (lengths[0] > lengths[1], lengths[0] < lengths[1]), strict=True):
            values: dict[str, Any] = {key: value for key, _, value in knobs.walk(job.config) if key in phases.KEYS}
            shortest = min(other.config.training.sequence_length for other in small)
            length = values["training.sequence_length"] = 2 * shortest if longer else shortest
            values["model.max_positions"] = max(values["model.max_positions"], length)
            values |= {"training.frozen": chosen.config.training.frozen, "model": chosen.config.model}
            values["optimizer.lr"] = rate * job.config.optimizer.lr
            configs.append(in_precision(knobs.changed(job.config, values), "fp32"))
        if not any(check.violations(config, job.world_size) for config, job in zip(configs, small, strict=True)):
            return phases.joined(configs[0], configs[1], saved_steps(configs[0])[-1])
    return None


def train_first(config: RunConfig, folder: str) -> None:
    """Train the first phase in its layout, and save it; rank 0 writes the outcome."""
    config = in_folder(config, folder)
    trainer = begin(config)
    saving = Saving(config, trainer)
    outcome = train_in_layout(config, trainer, [saving.after_step], saved_steps(config)[-1])
    saving.finish()
    if dist.get_rank() == 0:
        torch.save(outcome, Path(folder, FIRST))


def together(first: Outcome, second: Outcome) -> Outcome:
    """Return the outcome of the whole run."""
    tensors = {"gradient": first.tensors["gradient"], **second.tensors}
    return Outcome(first.losses + second.losses, first.norms + second.norms, tensors)
