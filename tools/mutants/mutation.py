"""A mutant: one mistake, as replacements of exact text in a copy of the source tree."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What a copy of the source tree needs to run a stage.
COPIED = ("pipeline", "conf")


class EditError(Exception):
    """The text that a mutation replaces does not occur exactly once: the source has changed, and the mutant must be written again."""


@dataclass(frozen=True)
class Edit:
    """A replacement in one file.

    Attributes:
        file: path in the source tree.
        old: text that occurs exactly once.
        new: what takes its place.
    """

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Replace the text in a copy of the source tree.

        Raises:
            EditError: the text does not occur exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise EditError(f"{self.file}: this text occurs {count} times, not once:\n{self.old}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Mutant:
    """One mistake and the job in which it matters.

    Attributes:
        name: of the mutant.
        bug: its number in tools/mutants/public.py.
        what: what is wrong, one line.
        ranks: of the job.
        words: overrides of the job, added to those of jobs.COMMON.
        edits: the mutation.
        resumed: overrides of the second half of the job if it is interrupted after half of its steps; None for an uninterrupted job.
        exact: whether it is a mistake of the list; False for the nearest form that exists here.
    """

    name: str
    bug: int
    what: str
    ranks: int
    words: tuple[str, ...]
    edits: tuple[Edit, ...]
    resumed: tuple[str, ...] | None = None
    exact: bool = True

    @property
    def digest(self) -> str:
        """A short text that is equal for equal mutants: a row of another one is not kept."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]


def copy_tree(folder: Path, edits: tuple[Edit, ...] = ()) -> Path:
    """Return a copy of the source tree with some replacements.

    Raises:
        EditError: as Edit.apply.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name)  # with the times of the files, so that compiled files stay valid
    for edit in edits:
        edit.apply(folder)
    return folder
