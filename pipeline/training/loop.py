"""The training loop: next batch, step, metrics, checkpoint. All state is the engine's and the number of samples consumed."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint import save
from pipeline.checkpoint.format import Index, Progress
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config.schema import RunConfig
from pipeline.data.loader import TokenDataset, document_ids
from pipeline.parallel.mesh import Mesh
from pipeline.progress import Progress as Bar
from pipeline.training.metrics import Metrics
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")

Batch = tuple[Tensor, Tensor | None]


class Batches:
    """This data rank's share of global batches, made ready one ahead in a thread.

    The share of data rank d in a batch that starts at sample s is s + d*n .. s + (d+1)*n - 1 with n = global batch / data ranks.
    """

    def __init__(self, dataset: TokenDataset, config: RunConfig, mesh: Mesh) -> None:
        self._dataset, self._device = dataset, mesh.device
        self._global = config.training.global_batch_size
        self._share = self._global // mesh.layout.data
        self._offset = mesh.where.data * self._share
        self._documents = config.training.document_mask

    def load(self, first: int) -> Batch:
        """The share of the global batch that starts at sample `first`, on the device.

        Returns:
            Tokens (n, sequence + 1), and documents (n, sequence) when the document mask is on.
        """
        indices = np.arange(first + self._offset, first + self._offset + self._share)
        tokens = self._dataset.samples(indices)
        documents = torch.from_numpy(document_ids(tokens[:, :-1], self._dataset.end_of_document)) if self._documents else None
        return self._to_device(torch.from_numpy(tokens)), None if documents is None else self._to_device(documents)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    def _use_device(self) -> None:
        """Make the rank's GPU the current one of a new thread, which would otherwise pin memory through GPU 0."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def following(self, first: int, count: int) -> Iterator[Batch]:
        """`count` batches from sample `first` on."""
        with ThreadPoolExecutor(1, initializer=self._use_device) as pool:
            ahead = pool.submit(self.load, first)
            for number in range(1, count + 1):
                batch = ahead.result()
                if number < count:
                    ahead = pool.submit(self.load, first + number * self._global)
                yield batch


def train(
    config: RunConfig,
    trainer: Trainer,
    training_data: TokenDataset,
    validation_data: TokenDataset | None,
    progress: Progress,
    metrics: Metrics,
    data_fingerprint: str,
) -> Progress:
    """Train from `progress` to the configured number of steps.

    Args:
        config: of the run.
        trainer: with the state that belongs to `progress`.
        training_data: the train split.
        validation_data: the validation split, None if there is none.
        progress: where to continue.
        metrics: where the numbers go.
        data_fingerprint: of the token shards, for the checkpoint.

    Returns:
        The progress at the end.
    """
    training, checkpoint = config.training, config.checkpoint
    batches = Batches(training_data, config, trainer.mesh).following(progress.samples, training.steps - progress.step)
    started = time.monotonic()
    with Bar(training.steps - progress.step, "pretrain", "step", trainer.mesh.rank, every=math.inf) as bar:
        for tokens, documents in batches:
            waited = time.monotonic() - started
            loss, result = trainer.train(tokens, documents)
            progress = Progress(progress.step + 1, progress.samples + training.global_batch_size, progress.updates)
            now = time.monotonic()
            metrics.add(progress, loss, result, now - started, {"data_seconds": waited})
            started = now
            bar.advance(1, f"loss {metrics.last['loss']:.3f}" if metrics.last else "")

            last = progress.step == training.steps
            if validation_data is not None and (last or (training.validate_every and progress.step % training.validate_every == 0)):
                validate(config, trainer, validation_data, progress.step, metrics, training.validation_batches)
                started = time.monotonic()
            if last or (checkpoint.every and progress.step % checkpoint.every == 0):
                metrics.flush()
                progress = dataclasses.replace(progress, updates=trainer.engine.updates())
                index = Index(progress, dataclasses.asdict(config), data_fingerprint)
                path = save.save(Path(config.run_dir), index, trainer.engine.fragments(), checkpoint.keep)
                log.info("step %d: wrote %s", progress.step, path)
                started = time.monotonic()
    return progress


def validate(
    config: RunConfig, trainer: Trainer, data: TokenDataset, step: int, metrics: Metrics | None, batches: int | None
) -> tuple[float, float]:
    """Mean loss and bits per byte over the first global batches of the validation split (all of it when `batches` is None).

    The split is read in whole global batches; a last one that it does not fill goes on with the split's beginning.

    Returns:
        (nats a token, bits a byte).
    """
    whole = math.ceil(data.windows / config.training.global_batch_size)
    count = whole if batches is None else min(batches, whole)
    source = Batches(data, config, trainer.mesh)
    total = torch.zeros((), device=trainer.mesh.device)
    with Bar(count, "validate", "batch", trainer.mesh.rank) as bar:
        for tokens, documents in source.following(0, count):
            total += trainer.evaluate(tokens, documents)
            bar.advance(1)
    loss = float(total) / count
    bits = loss / math.log(2) / data.bytes_per_token
    if metrics is not None:
        metrics.validation(step, loss, bits)
    return loss, bits


def resume(config: RunConfig, trainer: Trainer, path: Path | None, data_fingerprint: str) -> Progress:
    """Read a checkpoint into the trainer; the beginning when there is none.

    Raises:
        UserError: it belongs to another model or other data, or is corrupt.
    """
    if path is None:
        return Progress()
    checkpoint = Checkpoint(path)
    save.check_same_run(checkpoint, dataclasses.asdict(config), data_fingerprint)
    save.load(checkpoint, trainer.engine.fragments())
    trainer.engine.loaded(checkpoint.progress.updates)
    dist.barrier()
    log.info("continuing from %s: step %d, %d samples", path, checkpoint.progress.step, checkpoint.progress.samples)
    return checkpoint.progress
