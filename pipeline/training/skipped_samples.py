"""RUN/skipped_samples.json: the samples that a run leaves out after a loss spike. Imports no torch.

A run takes its samples in order, without those that are listed here. Which samples a step has is therefore a function of the first sample
that was not taken yet (TrainState.samples), of the file and of the batch size: the same in any layout, and for any interruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pipeline.checkpoint import checked_json
from pipeline.common.errors import UserError

FILE = "skipped_samples.json"


@dataclass(frozen=True)
class Rewind:
    """A return to a checkpoint.

    Attributes:
        checkpoint: its step.
        spike: first step of the loss spike, of the steps that were abandoned.
        first: first sample that is skipped, the next one of the checkpoint.
        last: one more than the last sample that is skipped.
    """

    checkpoint: int
    spike: int
    reason: str
    first: int
    last: int


class SkippedSamples:
    """The arithmetic of a run without the samples of its rewinds, which are given in their order."""

    def __init__(self, rewinds: Sequence[Rewind] = ()) -> None:
        self.rewinds = tuple(rewinds)
        self._ranges = sorted((rewind.first, rewind.last) for rewind in rewinds)

    def take(self, first: int, count: int) -> np.ndarray:
        """Return the next samples, (count,) int64, ascending.

        Args:
            first: the first sample that was not taken yet, which may be one that is skipped.
        """
        parts: list[np.ndarray] = []
        for begin, end in self._ranges:
            if first < begin and count:
                parts.append(np.arange(first, min(first + count, begin)))
                count -= len(parts[-1])
            first = max(first, end)
        return np.concatenate([*parts, np.arange(first, first + count)])

    def after(self, first: int, count: int) -> int:
        """Return the first sample that is not taken yet after take(first, count)."""
        return int(self.take(first, count)[-1]) + 1

    def are_of(self, samples: int) -> bool:
        """Whether a checkpoint with TrainState.samples is one of the abandoned steps: the next sample is skipped, or the last one was."""
        return any(first < samples <= last for first, last in self._ranges)


NONE = SkippedSamples()


def read(run_dir: Path) -> SkippedSamples:
    """Read the file; none are skipped without one.

    Raises:
        UserError: it is damaged.
    """
    path = run_dir / FILE
    try:
        return SkippedSamples([Rewind(**entry) for entry in checked_json.read(path)["rewinds"]])
    except FileNotFoundError:
        return SkippedSamples()
    except (ValueError, TypeError, KeyError) as error:
        rule = f"is not readable ({error}): it decides which samples the run reads"
        raise UserError.of(FILE, path, rule, "restore it from a copy, or begin a new run") from error


def write(run_dir: Path, skipped: SkippedSamples) -> None:
    """Replace the file."""
    checked_json.write(run_dir / FILE, {"rewinds": [asdict(rewind) for rewind in skipped.rewinds]})
