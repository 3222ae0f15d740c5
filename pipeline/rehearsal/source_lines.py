"""Lines of code of this package on the stack: of the caller, and in a backward pass of the forward pass that it belongs to."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[1]
#: What is not the job's own code.
_REHEARSAL = (str(PACKAGE / "rehearsal"), str(PACKAGE / "parallel" / "rehearsed_"))


class SourceLines:
    """Lines of code during a step; autograd's nodes have no frames of Python, and are found by their sequence number.

    Args:
        folder: whose code is meant.
    """

    def __init__(self, folder: Path = PACKAGE) -> None:
        self._folder = f"{folder}/"
        self._files: dict[str, str] = {}
        self._forward: dict[int, str] = {}
        self._thread = threading.get_ident()

    def _file(self, name: str) -> str:
        """A file within the folder; "" for one that is outside or of the rehearsal."""
        return name.removeprefix(self._folder) if name.startswith(self._folder) and not name.startswith(_REHEARSAL) else ""

    def here(self, *, in_function: bool = False) -> str:
        """The innermost line of the package on the stack, "training/loop.py:101"; that of the forward pass in a node of autograd; or "".

        Args:
            in_function: whether this is the forward pass of a function of autograd: without gradients, and after its node was made.
        """
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename  # the code itself has no hash if torch.compile made it with a constant that has none
            if (file := self._files.get(name)) is None:
                file = self._files[name] = self._file(name)
            if file:
                line = f"{file}:{frame.f_lineno}"
                break
            frame = frame.f_back  # type: ignore[assignment] # None at the outermost frame
        else:
            return self._of_forward()
        if (in_function or torch.is_grad_enabled()) and threading.get_ident() == self._thread:
            self._forward[torch._C._autograd._get_sequence_nr() - 1] = line
        return line

    def _of_forward(self) -> str:
        """The line of the operator whose gradient is computed."""
        node = torch._C._current_autograd_node()
        return self._forward.get(node._sequence_nr(), "") if node is not None else ""
