"""Writes what a teacher predicts for the samples of a run (stage.distill); data/load/teacher.py reads it, and describes the files."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import artifact
from pipeline.common.artifact import Manifest
from pipeline.common.atomic_files import atomic_file, report_disk_full
from pipeline.common.locks import claimed
from pipeline.common.progress import Progress
from pipeline.common.unfinished import Unfinished
from pipeline.config import warmup
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.data.load import teacher
from pipeline.data.load.objectives.objective import TokenShardObjective
from pipeline.parallel.mesh import on_rank_0
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")

KEY = "stage.distill"
FILE_BYTES = 256 << 20
"""Size of a file, in whole batches. A job that is interrupted begins at the first file that is missing."""


def write(config: RunConfig, stage: Evaluate, trainer: Trainer, data: TokenShardObjective, evaluated: dict[str, Any]) -> None:
    """Write the predictions for all samples of training.steps, those that are missing; collective.

    Args:
        config: of the run that will read them, with the model of the teacher.
        evaluated: what identifies the weights, by configuration key.

    Raises:
        UserError: the folder has the predictions of another teacher or of other samples, or another job writes it.
    """
    folder, k, training, mesh = Path(stage.distill or ""), stage.distill_top_k, config.training, trainer.mesh
    samples, length, batch = warmup.samples(training, training.steps), training.sample_length, training.global_batch_size
    record = teacher.record(config.model.vocab_size, k)
    per_file = batch * max(1, FILE_BYTES // (batch * length * record.itemsize))
    computed = {"training.document_mask": training.document_mask, "precision.dtype": config.precision.dtype}
    settings = {**teacher.identity(config, data, samples), "samples": samples, "stage.distill_top_k": k, **computed, **evaluated}
    unfinished = Unfinished(folder, settings, {"training.global_batch_size": batch})
    files = {f"{number:05d}": range(first, min(first + per_file, samples)) for number, first in enumerate(range(0, samples, per_file))}
    with report_disk_full(folder, KEY), ExitStack() as claims:
        missing: list[str] = on_rank_0(partial(_missing, unfinished, list(files), claims))
        if mesh.rank == 0 and missing:
            text = "%s samples of %d tokens, %d of each: %.3g GB, %.3g bytes a kept token"
            log.info(text, f"{samples:,}", length, k, samples * length * record.itemsize / 1e9, record.itemsize / k)
        loader = BatchLoader(data, training, mesh, config.data.prefetch)
        progress = Progress(sum(len(files[name]) for name in missing), "distill", "sample", mesh.rank)
        with progress as bar, trainer.engine.trained_weights():
            for name in missing:
                numbers = np.array(files[name])
                answers = np.zeros((len(numbers), length), dtype=record)
                for first, (tokens, inputs) in zip(range(0, len(numbers), batch), loader.validation(numbers), strict=True):
                    rows = answers[first : first + batch]
                    top = trainer.top_tokens(tokens, inputs, k)[: len(rows)]
                    if mesh.rank == 0:
                        rows["tokens"], rows["log_probabilities"] = top[..., :k].cpu(), top[..., k:].cpu()
                    bar.advance(len(rows))
                on_rank_0(partial(_write, unfinished, name, answers))
        totals = {"samples": samples, "length": length, "top_k": k, "vocabulary": config.model.vocab_size}
        on_rank_0(partial(_publish, unfinished, list(files), totals))


def _missing(unfinished: Unfinished, names: list[str], claims: ExitStack) -> list[str]:
    """Claim the folder and return the files that it lacks; none if it is complete."""
    folder = unfinished.output
    claims.enter_context(claimed(folder, KEY, prepare=partial(unfinished.take_over, KEY, ["*.bin"])))
    if artifact.find_complete(folder, key=KEY, stage=teacher.STAGE, settings=unfinished.settings):
        log.info("%s=%s is complete, nothing to do", KEY, folder)
        return []
    return [name for name in names if unfinished.note(name) is None]


def _write(unfinished: Unfinished, name: str, answers: np.ndarray) -> None:
    """Write a file and its completion record."""
    path = unfinished.output / f"{name}.bin"
    with atomic_file(path) as handle:
        handle.write(answers.tobytes())
    unfinished.write(name, artifact.entry(path))


def _publish(unfinished: Unfinished, names: list[str], totals: dict[str, Any]) -> None:
    """Write the manifest after all files are complete."""
    if (unfinished.output / artifact.MANIFEST).is_file():
        return
    files = {f"{name}.bin": unfinished.note(name) for name in names}
    artifact.write(unfinished.output, Manifest(teacher.STAGE, unfinished.settings, files, totals))
    unfinished.clear()
    log.info("evaluate: wrote the predictions of %s samples to %s", f"{totals['samples']:,}", unfinished.output)
