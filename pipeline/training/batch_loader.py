"""Loads a data rank's share of the global batches, prefetched in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.native import TrainState
from pipeline.config import warmup
from pipeline.config.training import TrainingConfig
from pipeline.data.load.objectives.objective import IGNORE, Objective
from pipeline.data.load.retries import UnreadableFile
from pipeline.layers.batch import Batch
from pipeline.parallel.mesh import Mesh
from pipeline.training.skipped_samples import NONE, SkippedSamples

#: Most seconds until all threads have given up after one of them has: they wait for nothing but a read.
GIVE_UP = 5.0
#: Tokens int64 (sequences, sequence), and the other model inputs; on the device.
DeviceBatch = tuple[Tensor, Batch]


class BatchLoader:
    """Loads batches in threads. The samples of a batch depend only on its index, not on the threads.

    A batch of n samples that starts at sample s has on data rank d of r the samples s + d*m .. s + (d+1)*m - 1 with m = n / r, if none of
    them is skipped.

    Args:
        prefetch: batches that are loaded ahead, each in a thread.

    Attributes:
        steps: training.steps.
        stalls: number of batches that were not ready when requested, including the first one of a run.
    """

    def __init__(self, objective: Objective, training: TrainingConfig, mesh: Mesh, prefetch: int, skipped: SkippedSamples = NONE) -> None:
        self._objective, self._training, self._device, self._ahead = objective, training, mesh.device, prefetch
        self._skipped, self.steps = skipped, training.steps
        self._rank, self._ranks = mesh.layout.batch_shard(mesh.coordinates), mesh.layout.batch_shards
        self.stalls = 0

    def batch_size(self, step: int) -> int:
        """Return the number of samples in the global batch of a step; `step` of them precede it."""
        return warmup.batch_size(self._training, step)

    def after(self, state: TrainState) -> TrainState:
        """Return the state after one step more."""
        return replace(state, step=state.step + 1, samples=self._skipped.after(state.samples, self.batch_size(state.step)))

    def remaining(self, state: TrainState) -> Iterator[DeviceBatch]:
        """Yield the batches of the steps that a run in this state has not made."""
        return self.training(state.samples, range(state.step, self.steps))

    def training(self, first: int, steps: range) -> Iterator[DeviceBatch]:
        """Yield the batches of these steps; the first one starts at sample `first`."""

        def requests(first: int) -> Iterator[tuple[np.ndarray, int, int]]:
            for step in steps:
                samples = self._skipped.take(first, self.batch_size(step))
                yield samples, len(samples), warmup.sequence_length(self._training, step)
                first = int(samples[-1]) + 1

        return self._prefetch(requests(first))

    def validation(self, samples: np.ndarray) -> Iterator[DeviceBatch]:
        """Yield samples, (n,) int64 numbers, in global batches; the last one is padded with rows that have no targets."""
        size, length = self._training.global_batch_size, self._training.sequence_length
        return self._prefetch((samples[first : first + size], size, length) for first in range(0, len(samples), size))

    def load(self, samples: np.ndarray, size: int, length: int) -> DeviceBatch:
        """Load this rank's share of a global batch to the device.

        Args:
            samples: numbers of the samples of the global batch; fewer than `size` are padded with rows that have no targets.
            size: number of rows of the global batch.
            length: tokens per sequence; longer samples are split into sequences of this length, and several shorter ones are joined.

        Returns:
            Tokens int64 (sequences, length), and the other model inputs that the objective creates.

        Raises:
            UnreadableFile: a shard could not be read for a minute.
        """
        count = size // self._ranks
        rows = np.arange(count) + self._rank * count
        chosen = samples[np.minimum(rows, len(samples) - 1)]
        try:
            arrays = self._objective.arrays(chosen)
        except UnreadableFile as error:
            error.samples = error.samples or (int(chosen[0]), int(chosen[-1]))
            raise
        if rows[-1] >= len(samples):
            arrays["targets"] = arrays["targets"].astype(np.int64)
            arrays["targets"][rows >= len(samples)] = IGNORE
            if "loss_weights" in arrays:
                arrays["loss_weights"][rows >= len(samples)] = 0
        if length > arrays["tokens"].shape[1]:
            arrays = self._objective.joined(arrays, chosen, length)
        elif length < arrays["tokens"].shape[1]:
            arrays = {name: array.reshape(-1, length, *array.shape[2:]) for name, array in arrays.items()}
        # Transferred as two bytes per token, then widened to eight on the device.
        dtypes = {"documents": torch.int32, "reference": torch.float32, "loss_weights": torch.float32}
        dtypes |= {"teacher_tokens": torch.int32, "teacher_log_probabilities": torch.float16}
        batch = {name: self._to_device(array).to(dtypes.get(name, torch.int64)) for name, array in arrays.items()}
        return batch.pop("tokens"), cast(Batch, batch)

    def _prefetch(self, requests: Iterator[tuple[np.ndarray, int, int]]) -> Iterator[DeviceBatch]:
        """Load batches ahead, each in a thread, and yield them in order."""
        with ThreadPoolExecutor(self._ahead, initializer=self._use_device) as pool:
            pending: deque[Future[DeviceBatch]] = deque()
            try:
                for request in requests:
                    pending.append(pool.submit(self.load, *request))
                    if len(pending) > self._ahead:
                        yield self._next(pending)
                while pending:
                    yield self._next(pending)
            finally:
                for future in pending:
                    future.cancel()

    def _next(self, pending: deque[Future[DeviceBatch]]) -> DeviceBatch:
        """Wait for the oldest batch; raises the first failure, which may be that of a later batch."""
        future = pending.popleft()
        self.stalls += 0 if future.done() else 1
        try:
            return future.result()
        except UnreadableFile as error:
            others = [other.exception() for other in wait(pending, GIVE_UP).done]
            failures = [error, *(other for other in others if isinstance(other, UnreadableFile))]
            raise min(failures, key=lambda failure: failure.since) from None

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    def _use_device(self) -> None:
        """Set the current device of a new thread, which would otherwise pin memory through GPU 0."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
