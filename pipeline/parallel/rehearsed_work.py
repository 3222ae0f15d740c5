"""The handle of an operation of a rehearsed process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work


class RehearsedWork(Work):
    """The handle of an operation: on a GPU, the event at its end, and the tensors that must live until it is waited for."""

    def __init__(self, event: torch.cuda.Event | None, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        super().__init__()
        self._event, self._tensors, self._results = event, list(tensors), list(results)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - signature of Work
        """Make the current stream wait for the operation."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._tensors = []
        return True

    def synchronize(self) -> None:
        """See wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has ended."""
        return self._event is None or self._event.query()

    def is_success(self) -> bool:
        """Nothing fails."""
        return True

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A completed future of the outputs."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future
