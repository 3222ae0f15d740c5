"""What a run has read, step by step: its own steps, and those of the runs that its weights come from. Imports no torch.

metrics.jsonl has the samples after every step that led to the newest weights; RUN/skipped_samples.json those that were left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint import native
from pipeline.common import metrics_file
from pipeline.common.errors import UserError
from pipeline.config import saved, warmup
from pipeline.config.schema import RunConfig
from pipeline.training import skipped_samples
from pipeline.training.skipped_samples import SkippedSamples

log = logging.getLogger("pipeline")


@dataclass(frozen=True)
class Stretch:
    """The steps of one run directory.

    Attributes:
        run_dir: the run directory.
        config: its configuration.
        before: steps before the first one.
        samples: (steps + 1,) int64, samples before the first step, and after each one.
        skipped: samples that were left out.
    """

    run_dir: Path
    config: RunConfig
    before: int
    samples: np.ndarray
    skipped: SkippedSamples

    @property
    def last(self) -> int:
        """The last step."""
        return self.before + len(self.samples) - 1

    def numbers(self, step: int) -> np.ndarray:
        """Return the samples of a step, (n,) int64."""
        first, stop = self.samples[step - self.before - 1 : step - self.before + 1].tolist()
        return np.array([number for number in self.skipped.take(first, stop - first) if number < stop], dtype=np.int64)

    def steps(self, numbers: np.ndarray) -> np.ndarray:
        """Return the step that read each sample, (n,) int64; 0 for a sample that none has read."""
        steps = np.searchsorted(self.samples, numbers, side="right") + self.before
        unread = (numbers < self.samples[0]) | (numbers >= self.samples[-1])
        for rewind in self.skipped.rewinds:
            unread |= (numbers >= rewind.first) & (numbers < rewind.last)
        return np.where(unread, 0, steps)


def read(run_dir: Path, key: str = "run_dir", last: int | None = None) -> list[Stretch]:
    """Return the steps of a run and of those before it, the oldest first. Of a merge all members are among them.

    Args:
        run_dir: the run directory.
        key: the configuration key that names it.
        last: the last step to include; all when None.

    Raises:
        UserError: it has no configuration or no steps, or its metrics lack steps.
    """
    config = saved.read(run_dir, key)
    parent = _parent(run_dir)
    begins = parent is not None and parent["how"] == "fork"
    before = int(parent["step"]) if parent is not None and begins else 0
    after = {line["step"]: line["samples"] for line in metrics_file.read(run_dir) if "samples" in line and line["step"] > before}
    steps = [step for step in sorted(after) if last is None or step <= last]
    if not steps and parent is None:
        raise UserError.of(key, run_dir, "has no training step in metrics.jsonl", "name the run_dir of stage=pretrain")
    if steps != list(range(before + 1, before + 1 + len(steps))):
        missing = next(number for number in range(before + 1, steps[-1]) if number not in after)
        raise UserError.of(key, run_dir, f"metrics.jsonl lacks step {missing}", "restore it from a copy: it tells which samples were read")
    found = [stretch for path, step in _origins(parent) for stretch in _older(path, step)]
    if steps:
        first = 0
        if begins:  # as the trunk says; if that is gone, by the batch size of the first step
            first = int(found[-1].samples[-1]) if found else after[steps[0]] - warmup.batch_size(config.training, before)
        samples = np.array([first, *(after[step] for step in steps)], dtype=np.int64)
        found.append(Stretch(run_dir, config, before, samples, skipped_samples.read(run_dir)))
    return found


def _parent(run_dir: Path) -> dict[str, Any] | None:
    """Index.parent of the newest checkpoint."""
    complete = native.complete(run_dir)
    return native.read_index(complete[-1]).parent if complete else None


def _origins(parent: dict[str, Any] | None) -> Iterator[tuple[Path, int]]:
    """Yield the checkpoints that a run began with, as run directory and step."""
    if parent is not None and parent["how"] in ("fork", "initialize_from", "merge"):
        for member in parent.get("members") or [parent]:
            yield Path(member["path"]).parent.parent, int(member["step"])


def _older(run_dir: Path, step: int) -> list[Stretch]:
    """The steps before a checkpoint of another run, with a warning if that is not there any more."""
    try:
        return read(run_dir, last=step)
    except UserError as error:
        log.warning("what was read up to step %d of %s is not known: %s", step, run_dir, error.violations[0])
        return []
