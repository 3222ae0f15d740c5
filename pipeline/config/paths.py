"""The location of the configuration files and of the batch scripts."""

from __future__ import annotations

import os
import re
from pathlib import Path


def _shipped(name: str) -> Path:
    """A folder that comes with the package: inside of it where a wheel is installed, else at the repository root."""
    package = Path(__file__).resolve().parents[1]
    return package / name if (package / name).is_dir() else package.parent / name


#: conf/: one folder per Hydra group, one file per option. PIPELINE_CONF names a copy, with which a job of a sweep uses the files of the
#: time of its submission.
CONF_DIR = Path(os.environ.get("PIPELINE_CONF") or _shipped("conf"))
#: slurm/: one batch script per stage.
SLURM_DIR = _shipped("slurm")


def batch_scripts(directory: Path) -> Path | None:
    """Return the folder of the batch scripts for jobs of a working directory; None if that has a folder slurm/ with them."""
    return None if (directory / "slurm" / "site.sh").is_file() else SLURM_DIR


def split(where: str | Path) -> tuple[Path, int | None]:
    """Return the run directory that a path names, and the step; None for the newest checkpoint of the run."""
    path = Path(where)
    if (named := re.fullmatch(r"step-(\d+)", path.name)) is None:
        return path, None
    folder = path.parent
    return folder.parent if folder.name == "checkpoints" else folder, int(named[1])
