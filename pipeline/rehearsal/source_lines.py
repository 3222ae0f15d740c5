"""Lines of code of this package on the stack: of the caller, and in a backward pass of the forward pass that it belongs to."""

from __future__ import annotations

import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType

import torch

PACKAGE = Path(__file__).parents[1]
#: What is not the job's own code.
_REHEARSAL = (str(PACKAGE / "rehearsal"), str(PACKAGE / "parallel" / "rehearsed_"))


@cache
def _file(code: CodeType) -> str:
    """The file of a function within the package; "" for one that is outside or of the rehearsal."""
    name = code.co_filename
    if not name.startswith(f"{PACKAGE}/") or name.startswith(_REHEARSAL):
        return ""
    return name.removeprefix(f"{PACKAGE}/")


class SourceLines:
    """Lines of code during a step; autograd's nodes have no frames of Python, and are found by their sequence number."""

    def __init__(self) -> None:
        self._forward: dict[int, str] = {}
        self._thread = threading.get_ident()

    def here(self) -> str:
        """The innermost line of the package on the stack, "training/loop.py:101"; that of the forward pass in a node of autograd; or ""."""
        frame = sys._getframe(1)
        while frame is not None:
            if found := _file(frame.f_code):
                line = f"{found}:{frame.f_lineno}"
                break
            frame = frame.f_back  # type: ignore[assignment] # None at the outermost frame
        else:
            return self._of_forward()
        if torch.is_grad_enabled() and threading.get_ident() == self._thread:
            self._forward[torch._C._autograd._get_sequence_nr() - 1] = line
        return line

    def _of_forward(self) -> str:
        """The line of the operator whose gradient is computed."""
        node = torch._C._current_autograd_node()
        return self._forward.get(node._sequence_nr(), "") if node is not None else ""
