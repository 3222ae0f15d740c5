"""A data rank's share of global batches, made ready ahead of the step that takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from pipeline.config import warmup
from pipeline.config.schema import RunConfig
from pipeline.data.load.boundaries import document_ids
from pipeline.data.load.loader import Samples
from pipeline.layers.batch import Batch
from pipeline.parallel.mesh import Mesh

#: tokens int64 (sequences, sequence), and what belongs to them
Loaded = tuple[Tensor, Batch]


def causal(tokens: Tensor, documents: Tensor | None = None) -> Loaded:
    """Each position's label is the next token.

    Args:
        tokens: int64 (sequences, sequence + 1).
        documents: int (sequences, sequence), None where tokens may look across documents.
    """
    batch: Batch = {"targets": tokens[:, 1:]}
    if documents is not None:
        batch["documents"] = documents
    return tokens[:, :-1], batch


class Batches:
    """Loads batches in threads. Which samples a batch holds depends on its number alone, not on the threads.

    Share d of a batch of n samples that starts at sample s is s + d*m .. s + (d+1)*m - 1 with m = n / shares.

    Attributes:
        stalls: batches so far that were not ready when they were asked for; a run's first batch always is.
    """

    def __init__(self, samples: Samples, config: RunConfig, mesh: Mesh) -> None:
        self._samples, self._config, self._device = samples, config, mesh.device
        self._rank, self._ranks = mesh.layout.share(mesh.where), mesh.layout.shares
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
            Tokens int64 (sequences, length), and their targets; documents when the document mask is on.
        """
        share = size // self._ranks
        tokens = self._samples.samples(np.arange(share) + first + self._rank * share)
        if length < tokens.shape[1] - 1:
            tokens = sliding_window_view(tokens, length + 1, axis=1, writeable=True)[:, ::length].reshape(-1, length + 1)
        documents = None
        if self._config.training.document_mask:
            documents = self._to_device(document_ids(tokens[:, :-1], self._samples.end_of_document))
        # Two bytes a token on the way to the device, eight in its memory.
        return causal(self._to_device(tokens).to(torch.int64), documents)

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
