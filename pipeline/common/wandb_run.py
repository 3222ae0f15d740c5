"""The run of a run directory in Weights & Biases: one, each time that a job continues it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError

#: File of a run directory with the id.
FILE = ".wandb_id"


def run_id(run_dir: Path) -> str:
    """Return the id of the run in Weights & Biases."""
    path = run_dir / FILE
    if not path.is_file():
        with atomic_file(path, "w") as handle:
            handle.write(uuid.uuid4().hex)
    return path.read_text(encoding="utf-8")


def start(run_dir: Path, folder: Path, mode: str, project: str, name: str | None, settings: dict[str, Any]) -> Any:
    """Start the run, or continue it; returns wandb.Run.

    Args:
        folder: in which the folder wandb/ is written.
        mode: "offline" or "online".
        name: of the run; None for that of the run directory.

    Raises:
        UserError: there is no API key or no network.
    """
    import wandb

    try:
        return wandb.init(
            project=project,
            name=name or run_dir.name,
            id=run_id(run_dir),
            resume="allow",
            dir=str(folder),
            mode=mode,  # type: ignore[arg-type]
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:  # no API key, no network
        fix = "run `wandb login` on a node with internet access, or set tracking.wandb=offline and send the metrics later: tools/wandb_sync"
        raise UserError.of("tracking.wandb", mode, f"Weights & Biases did not start: {error}", fix) from error
