"""checkpoints/catalog.json: which checkpoints of a run are complete, and which one is being written. Imports no torch.

A reader finds the newest checkpoint by this one small file; folders are listed only in run directories of older versions, which have none.
Only the process that holds the lock of the run directory writes it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pipeline.checkpoint import checked_json
from pipeline.common.atomic_files import remove_folder

log = logging.getLogger("pipeline")

INDEX = "index.json"
CATALOG = "catalog.json"
#: File in the folder of a checkpoint that is never removed; its text is the name that a user gave it.
KEEP = "keep"


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is being written.

    Attributes:
        folder: name of the hidden folder in checkpoints/.
        writers: number of records that it needs to be complete.
        started: time in UTC, ISO 8601.
    """

    step: int
    folder: str
    writers: int
    started: str


@dataclass(frozen=True)
class Catalog:
    """Content of the catalog.

    Attributes:
        complete: steps of the complete checkpoints, ascending.
        pending: the checkpoint that is being written, or that a job did not finish.
    """

    complete: list[int] = field(default_factory=list)
    pending: Pending | None = None


def folder_of(run_dir: Path, step: int) -> Path:
    """Path of the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder."""
    return int(folder.name.removeprefix("step-"))


def complete(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first: those that the catalog names, without those that were removed.

    A folder whose index was lost is one of them, so that reading it reports the damage. No kill leaves such a folder: a commit writes the
    index before it renames the folder, and a removal renames the folder first.
    """
    return [folder for step in read(run_dir).complete if (folder := folder_of(run_dir, step)).is_dir()]


def read(run_dir: Path) -> Catalog:
    """Read the catalog of a run directory; without one, the folders are listed."""
    path = run_dir / "checkpoints" / CATALOG
    try:
        content = checked_json.read(path)
        pending = None if content["pending"] is None else Pending(**content["pending"])
        return Catalog([int(step) for step in content["complete"]], pending)
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError) as error:
        log.warning("%s is not readable (%s): the folders beside it are listed instead", path, error)
    return Catalog(listed(run_dir))


def listed(run_dir: Path) -> list[int]:
    """Steps of the folders in checkpoints/ with an index, ascending."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(step_of(f) for f in folders if re.fullmatch(r"step-\d{8,}", f.name) and (f / INDEX).is_file())


def write(run_dir: Path, catalog: Catalog) -> None:
    """Replace the catalog.

    Raises:
        OSError: it cannot be written; the old one remains.
    """
    steps = sorted(set(catalog.complete))
    checked_json.write(run_dir / "checkpoints" / CATALOG, {"format": 2, **asdict(replace(catalog, complete=steps))})


def prune(run_dir: Path, keep: int, every: int = 0, needed: Callable[[Path], bool] = lambda _: False) -> None:
    """Remove the checkpoints that no rule keeps. The caller holds the lock of the run directory.

    Args:
        keep: number of newest checkpoints that are kept.
        every: steps; a checkpoint whose step is a multiple is kept, 0 for none.
        needed: whether an older one is kept, too.

    Raises:
        OSError: a folder cannot be removed; the next call tries it again.
    """
    catalog = read(run_dir)
    unmarked = [folder for folder in complete(run_dir)[:-keep] if not (folder / KEEP).is_file()]
    removed = [folder for folder in unmarked if not (every and step_of(folder) % every == 0) and not needed(folder)]
    for folder in removed:
        remove_folder(folder)
    if removed:
        write(run_dir, replace(catalog, complete=[step for step in catalog.complete if folder_of(run_dir, step) not in removed]))
