"""Where the recomputations of a recorded step end.

PyTorch ends a recomputation by an exception when the last tensor that is needed has been saved again. Memory that is freed meanwhile is
traced while the exception is set, and PyTorch's trace of its CUDA calls loses the exception. Once there is a trace, which cannot be ended,
recomputations therefore run to their end, and what follows is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as torch_checkpoint


class EarlyStop:
    """Whether a recomputation has all that it is for.

    Attributes:
        is_past: it has: what runs now would not run in a job.
    """

    def __init__(self) -> None:
        self.is_past = False


def without_exceptions() -> EarlyStop:
    """Let all further recomputations of this process run to their end."""
    stop, original = EarlyStop(), torch_checkpoint._recomputation_hook

    class Hooks(original):  # type: ignore[misc, valid-type]
        pack_hook: Callable[[Any], Any]

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pack = self.pack_hook

            def saved(value: Any) -> Any:
                if not stop.is_past:
                    try:
                        return pack(value)
                    except torch_checkpoint._StopRecomputationError:
                        stop.is_past = True
                return value

            self.pack_hook = saved

        def __exit__(self, *arguments: Any) -> None:
            stop.is_past = False
            super().__exit__(*arguments)

    torch_checkpoint._recomputation_hook = Hooks  # type: ignore[misc, assignment]
    return stop
