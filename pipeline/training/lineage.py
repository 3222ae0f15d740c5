"""What a run has read, step by step: its own steps, and those of the runs that its weights come from. Imports no torch.

metrics.jsonl has the samples after every step that led to the newest weights; RUN/skipped_samples.json those that were left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint import native
from pipeline.common import metrics_file
from pipeline.common.errors import UserError
from pipeline.config import saved, warmup
from pipeline.config.run_tokenizer import IMPORTED
from pipeline.config.schema import RunConfig
from pipeline.data.load import removal, stage_in
from pipeline.data.load.ledger import DocumentLedger
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import TokenShardObjective
from pipeline.training import skipped_samples
from pipeline.training.skipped_samples import SkippedSamples

log = logging.getLogger("pipeline")


@dataclass(frozen=True)
class Stretch:
    """The steps of one run directory.

    Attributes:
        before: steps before the first one.
        samples: (steps + 1,) int64, samples before the first step, and after each one.
        skipped: samples that were left out.
        removed: documents that are left out (data/load/removal.py).
        removed_counts: (steps,) int64, how many of them each step has left out.
    """

    run_dir: Path
    config: RunConfig
    before: int
    samples: np.ndarray
    skipped: SkippedSamples
    removed: list[dict[str, Any]]
    removed_counts: np.ndarray

    @property
    def last(self) -> int:
        """The last step."""
        return self.before + len(self.samples) - 1

    def numbers(self, step: int) -> np.ndarray:
        """Return the samples of a step, (n,) int64."""
        first, stop = self.samples[step - self.before - 1 : step - self.before + 1].tolist()
        return np.array([number for number in self.skipped.take(first, stop - first) if number < stop], dtype=np.int64)

    def ledger(self, shards: Sequence[str] = ()) -> DocumentLedger | None:
        """Return the documents of its samples; None with a warning if they are none of token shards.

        Args:
            shards: folders of their text shards; data.shards of the run when empty.

        Raises:
            UserError: the shards are not there any more.
        """
        kind = registry.objective_of(self.config)
        if not issubclass(kind, TokenShardObjective):
            log.warning("%s has read %s, which has no documents: its steps are left out", self.run_dir, kind.data_key)
            return None
        removed = str(self.run_dir / removal.FILE) if self.removed else None
        data = stage_in.staged(replace(self.config.data, verify="off", remove=removed), only_urls=True)
        samples = kind.open_training(replace(self.config, data=data), (1, 2)).samples
        folders = [Path(folder) for folder in shards or [data.shards]]
        return DocumentLedger(samples, [folder for folder in folders if shards or folder.is_dir()])

    def left_out(self, step: int) -> list[dict[str, Any]]:
        """Return the documents that a step has left out."""
        return self.removed[: int(self.removed_counts[step - self.before - 1])]

    @cached_property
    def removed_numbers(self) -> dict[removal.Identity, int]:
        """The number of every document in `removed`."""
        return {removal.identity(line): number for number, line in enumerate(self.removed)}

    def removed_from(self, document: removal.Identity) -> int | None:
        """Return the first step that has left out a document of `removed`; None if none has."""
        steps = np.flatnonzero(self.removed_counts > self.removed_numbers[document])
        return self.before + 1 + int(steps[0]) if len(steps) else None

    def leaves_out(self, content: str, documents: np.ndarray, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return whether steps have left out documents, (n,) bool.

        Args:
            content: checksum of the token shard.
            documents: int64, documents in it.
            rows: (n,) int64, the place in `documents` of each.
            steps: (n,) int64, steps of this run directory.
        """
        last = len(self.removed)
        numbers = np.array([self.removed_numbers.get((content, document), last) for document in documents.tolist()], dtype=np.int64)
        left_out: np.ndarray = self.removed_counts[steps - self.before - 1] > numbers[rows]
        return left_out

    def steps(self, numbers: np.ndarray) -> np.ndarray:
        """Return the step that read each sample, (n,) int64; 0 for a sample that none has read."""
        steps = np.searchsorted(self.samples, numbers, side="right") + self.before
        unread = (numbers < self.samples[0]) | (numbers >= self.samples[-1])
        for rewind in self.skipped.rewinds:
            unread |= (numbers >= rewind.first) & (numbers < rewind.last)
        return np.where(unread, 0, steps)


def read(run_dir: Path, key: str = "run_dir", last: int | None = None, gaps: list[str] | None = None) -> list[Stretch]:
    """Return the steps of a run and of those before it, the oldest first. Of a merge all members are among them.

    Args:
        key: the configuration key that names it.
        last: the last step to include; all when None.
        gaps: gets what the weights have learned from besides: runs that are not there any more, and imported models.

    Raises:
        UserError: it has no configuration or no steps, or its metrics lack steps.
    """
    config, gaps = saved.read(run_dir, key), [] if gaps is None else gaps
    if (run_dir / IMPORTED).is_dir():
        gaps.append(f"the model that was imported into {run_dir}")
    parent = _parent(run_dir)
    begins = parent is not None and parent["how"] in ("fork", "merge")
    before = int(parent["step"]) if parent is not None and begins else 0
    lines = [line for line in metrics_file.read(run_dir) if "samples" in line and line["step"] > before]
    after, counts = {line["step"]: line["samples"] for line in lines}, {line["step"]: line.get("removed", 0) for line in lines}
    steps = [step for step in sorted(after) if last is None or step <= last]
    if not steps and parent is None:
        raise UserError.of(key, run_dir, "has no training step in metrics.jsonl", "name the run_dir of stage=pretrain")
    if steps != list(range(before + 1, before + 1 + len(steps))):
        missing = next(number for number in range(before + 1, steps[-1]) if number not in after)
        raise UserError.of(key, run_dir, f"metrics.jsonl lacks step {missing}", "restore it from a copy: it tells which samples were read")
    stretches = [stretch for path, step in origins(parent) for stretch in _older(path, step, gaps)]
    if steps:
        first = 0
        if begins:  # as the trunk or the newest member says; if that is gone, by the batch size of the first step
            trunks = (int(stretch.samples[-1]) for stretch in reversed(stretches) if stretch.last == before)
            first = next(trunks, after[steps[0]] - warmup.batch_size(config.training, before))
        samples = np.array([first, *(after[step] for step in steps)], dtype=np.int64)
        left_out = np.array([counts[step] for step in steps], dtype=np.int64)
        stretches.append(Stretch(run_dir, config, before, samples, skipped_samples.read(run_dir), removal.of_run(run_dir), left_out))
    return stretches


def _parent(run_dir: Path) -> dict[str, Any] | None:
    """Index.parent of the newest checkpoint."""
    complete = native.complete(run_dir)
    return native.read_index(complete[-1]).parent if complete else None


def origins(parent: dict[str, Any] | None) -> Iterator[tuple[Path, int]]:
    """Yield the checkpoints that a run began with, as run directory and step."""
    if parent is not None and parent["how"] in ("fork", "initialize_from", "merge"):
        for member in parent.get("members") or [parent]:
            yield Path(member["path"]).parent.parent, int(member["step"])


def run_dirs(parent: dict[str, Any] | None) -> Iterator[Path]:
    """Yield the run directories of `origins`; where one has removed no documents, as a merge, also those that it began with."""
    for run_dir, _ in origins(parent):
        yield run_dir
        if not (run_dir / removal.FILE).is_file():
            yield from run_dirs(_parent(run_dir))


def _older(run_dir: Path, step: int, gaps: list[str]) -> list[Stretch]:
    """The steps before a checkpoint of another run, with a warning if that is not there any more."""
    try:
        return read(run_dir, last=step, gaps=gaps)
    except UserError as error:
        gaps.append(f"{run_dir} up to step {step}")
        log.warning("what was read up to step %d of %s is not known: %s", step, run_dir, error.violations[0])
        return []
