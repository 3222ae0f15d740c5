"""Log-probabilities of the reference model of DPO, computed once with the weights that a run begins with, and read afterwards.

A folder has a subfolder for each set of pairs, named by its fingerprint: `answers.npy`, fp32 (pairs, 2) in the order of the files, and a
manifest with fingerprints of the pairs and of the reference's weights. Runs with the same start and pairs share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.checkpoint import load_any_layout
from pipeline.checkpoint.lora_adapter import base_hash
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.native import TrainState
from pipeline.common import artifact
from pipeline.common.artifact import Manifest
from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.common.progress import Progress
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.data.load.objectives.supervised import Preferences
from pipeline.parallel.mesh import on_rank_0
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.starting_checkpoint import initial_checkpoint
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")

KEY, FILE = "data.instructions.reference", "answers.npy"
#: Folder in a run directory.
DEFAULT = "reference"


def folder_of(config: RunConfig) -> Path:
    """The folder of a run's reference log-probabilities."""
    return Path(config.data.instructions.reference or Path(config.run_dir) / DEFAULT)


def attach(
    config: RunConfig,
    trainer: Trainer,
    begin: Path | None,
    state: TrainState,
    training: Objective,
    validation: Objective | None,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Give the pairs of a run the log-probabilities of its reference, which are computed if they are not stored; collective.

    Args:
        config: of the run; others than those of DPO with a stored reference return at once.
        trainer: with the weights of the run.
        begin: the checkpoint that it continues from; None for checkpoint.initialize_from.
        state: its state. Without samples, its weights are those of the reference.
        report: called with what is done, after every batch.

    Raises:
        UserError: they are not stored, and the run has trained already; they are those of other weights; or the file is damaged.
    """
    if not config.stores_reference:
        return
    weights: str | None = None
    if not state.samples:
        start = begin or on_rank_0(lambda: initial_checkpoint(config.checkpoint.initialize_from or ""))
        checkpoint = load_any_layout.open_on_all_ranks(start)
        weights = on_rank_0(lambda: base_hash(MergedWeights(checkpoint), config.model))
    for data, full in ((training, False), (validation, True)):
        if not isinstance(data, Preferences):
            continue
        folder = folder_of(config) / data.fingerprint(config, 0)
        if not on_rank_0(partial(_is_stored, folder, weights)):
            answers = _computed(config, trainer, data, full=full, report=report)
            on_rank_0(partial(_store, folder, answers, str(weights)))
        data.reference = _read(folder, trainer.mesh.rank)


def _is_stored(folder: Path, weights: str | None) -> bool:
    """Whether a folder has log-probabilities, which must be those of these weights; None for weights that are no longer there."""
    if not (folder / artifact.MANIFEST).is_file():
        if weights is None:
            rule = "has no reference log-probabilities of these pairs, and the weights of the run are no longer those of its reference"
            fix = f"restore the folder, set {KEY} to the one of the first job, or begin again in another run_dir"
            raise UserError.of(KEY, folder.parent, rule, fix)
        return False
    manifest = artifact.read(folder, key=KEY, stage="finetune")
    if weights is not None and manifest.settings["weights"] != weights:
        rule = "has the log-probabilities of another reference: the run begins with other weights than it was written with"
        raise UserError.of(KEY, folder.parent, rule, "set it to another folder, or start from the checkpoint of the first run")
    return True


def _computed(config: RunConfig, trainer: Trainer, data: Preferences, *, full: bool, report: Callable[[str], None]) -> np.ndarray:
    """The log-probabilities of all pairs, fp32 (pairs, 2) in the order of the files; `full`: without training.attention_group."""
    pairs, size = int(data.samples.counts[0]), config.training.global_batch_size
    reference, samples = np.zeros((pairs, 2), dtype=np.float32), np.arange(pairs)
    places = data.samples.places(samples)
    if trainer.mesh.rank == 0:
        log.info("computing the reference log-probabilities of %s pairs", f"{pairs:,}")
    with Progress(-(-pairs // size), "reference", "batch", trainer.mesh.rank) as bar:
        batches = BatchLoader(data, config.training, trainer.mesh, config.data.prefetch).validation(samples)
        for number, (tokens, batch) in enumerate(batches):
            answers = trainer.answers(tokens, batch, full=full)
            mine = places[number * size : (number + 1) * size]
            reference[mine] = answers[: len(mine)].cpu().numpy()
            bar.advance(1)
            report("reference log-probabilities")
    return reference


def _store(folder: Path, answers: np.ndarray, weights: str) -> None:
    """Write the log-probabilities and their manifest, atomically: a folder with a manifest is complete."""
    with atomic_file(folder / FILE) as handle:
        np.save(handle, answers)
    files = {FILE: artifact.entry(folder / FILE)}
    artifact.write(folder, Manifest("finetune", {"weights": weights, "pairs": folder.name}, files, {"pairs": len(answers)}))
    log.info("wrote the reference log-probabilities of %s pairs to %s", f"{len(answers):,}", folder)


def _read(folder: Path, rank: int) -> np.ndarray:
    """The log-probabilities, mapped from their file; rank 0 verifies it.

    Raises:
        UserError: the file is damaged.
    """
    if rank == 0:
        artifact.verify_files(folder, artifact.read(folder, key=KEY, stage="finetune"))
    answers: np.ndarray = np.load(folder / FILE, mmap_mode="r")
    return answers
