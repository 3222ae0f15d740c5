"""What a path says of a checkpoint: its run directory, and its step. `RUN/step-300` stands for `RUN/checkpoints/step-00000300`."""

from __future__ import annotations

import re
from pathlib import Path


def split(where: str | Path) -> tuple[Path, int | None]:
    """Return the run directory that a path names, and the step; None for the newest checkpoint of the run."""
    path = Path(where)
    if (named := re.fullmatch(r"step-(\d+)", path.name)) is None:
        return path, None
    folder = path.parent
    return folder.parent if folder.name == "checkpoints" else folder, int(named[1])
