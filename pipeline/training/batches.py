"""A data rank's share of global batches, made ready ahead of the step that takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pipeline.config import warmup
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.layers.batch import Batch
from pipeline.parallel.mesh import Mesh

#: tokens int64 (sequences, sequence), and what belongs to them
Loaded = tuple[Tensor, Batch]


class BatchLoader:
    """Loads batches in threads. Which samples a batch holds depends on its number alone, not on the threads.

    Share d of a batch of n samples that starts at sample s is s + d*m .. s + (d+1)*m - 1 with m = n / shares.

    Attributes:
        stalls: batches so far that were not ready when they were asked for; a run's first batch always is.
    """

    def __init__(self, objective: Objective, config: RunConfig, mesh: Mesh) -> None:
        self._objective, self._config, self._device = objective, config, mesh.device
        self._rank, self._ranks = mesh.layout.batch_shard(mesh.where), mesh.layout.batch_shards
        self.stalls = 0

    def training(self, first: int, steps: range) -> Iterator[Loaded]:
        """The batches of these steps, the first of them starting at sample `first`."""

        def work(first: int) -> Iterator[tuple[int, int, int]]:
            for step in steps:
                size = warmup.batch_size(self._config.training, step)
                yield first, size, warmup.sequence_length(self._config.training, step)
                first += size

        return self._ahead(work(first))

    def validation(self, count: int) -> Iterator[Loaded]:
        """`count` whole batches from the first sample on."""
        size, length = self._config.training.global_batch_size, self._config.training.sequence_length
        return self._ahead((number * size, size, length) for number in range(count))

    def load(self, first: int, size: int, length: int) -> Loaded:
        """This rank's share of a global batch, on the device.

        Args:
            first: the batch's first sample.
            size: its samples.
            length: tokens a sequence; samples are cut into sequences of so many.

        Returns:
            Tokens int64 (sequences, length), and what the objective makes with them.
        """
        share = size // self._ranks
        arrays = self._objective.arrays(np.arange(share) + first + self._rank * share)
        if length < arrays["tokens"].shape[1]:
            arrays = {name: array.reshape(-1, length) for name, array in arrays.items()}
        # Two bytes a token on the way to the device, eight in its memory.
        batch = {name: self._to_device(array).to(torch.int32 if name == "documents" else torch.int64) for name, array in arrays.items()}
        return batch.pop("tokens"), cast(Batch, batch)

    def _ahead(self, work: Iterator[tuple[int, int, int]]) -> Iterator[Loaded]:
        """Load as many batches ahead as data.prefetch says, each in a thread, and hand them out in order."""
        prefetch = self._config.data.prefetch
        with ThreadPoolExecutor(prefetch, initializer=self._use_device) as pool:
            waiting: deque[Future[Loaded]] = deque()
            try:
                for arguments in work:
                    waiting.append(pool.submit(self.load, *arguments))
                    if len(waiting) > prefetch:
                        yield self._next(waiting)
                while waiting:
                    yield self._next(waiting)
            finally:
                for future in waiting:
                    future.cancel()

    def _next(self, waiting: deque[Future[Loaded]]) -> Loaded:
        """The oldest batch."""
        future = waiting.popleft()
        self.stalls += not future.done()
        return future.result()

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    def _use_device(self) -> None:
        """Make the rank's GPU the current one of a new thread, which would otherwise pin memory through GPU 0."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
