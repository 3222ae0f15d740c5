"""Checkpoints that are kept for ever under a name: the file `keep` in their folder. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint import catalog
from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError


def name_of(folder: Path) -> str | None:
    """The name under which a checkpoint is kept; None if it is not."""
    file = folder / catalog.KEEP
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def kept(run_dir: Path) -> dict[Path, str]:
    """The checkpoints of a run that are kept under a name, oldest first."""
    names = {folder: name_of(folder) for folder in catalog.complete(run_dir)}
    return {folder: name for folder, name in names.items() if name is not None}


def keep(folder: Path, name: str) -> None:
    """Keep a checkpoint for ever. A name that it has already is replaced.

    Raises:
        UserError: the name is empty or has several lines, another checkpoint of the run has it, or the run has removed the checkpoint in
            the meantime.
    """
    if not name.strip() or not name.isprintable():
        raise UserError.of("NAME", repr(name), "must be one line of text", "give the checkpoint a name such as before-cooldown")
    for other, known in kept(folder.parents[1]).items():
        if known == name.strip() and other.resolve() != folder.resolve():
            fix = f"choose another name, or release that one: tools/checkpoint keep {other} --remove"
            raise UserError.of("NAME", repr(name), f"is the name of {other}", fix)
    with atomic_file(folder / catalog.KEEP, "w") as handle:
        handle.write(name.strip() + "\n")
    if not (folder / catalog.INDEX).is_file():
        raise UserError.of("PATH", folder, "was removed by its run in the meantime", "keep a newer checkpoint, or increase checkpoint.keep")


def release(folder: Path) -> None:
    """No longer keep a checkpoint; its run removes it when it is not among the newest ones.

    Raises:
        UserError: it was not kept.
    """
    try:
        (folder / catalog.KEEP).unlink()
    except FileNotFoundError as error:
        raise UserError.of("PATH", folder, "is not kept under a name", "name one that tools/checkpoint keep RUN --list prints") from error
