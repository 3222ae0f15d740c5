"""What Hydra's sweeper does before it calls a launcher: it composes each point to see whether it does, and writes multirun.yaml."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.utils import filter_overrides
from omegaconf import DictConfig

#: The settings of the newest command, in the folder of a sweep.
FILE = "multirun.yaml"

Load = Callable[[DictConfig, list[str]], DictConfig]


class MultirunFile:
    """multirun.yaml of a sweep that is refused, or only shown: it is removed, or is again that of the command before.

    Args:
        folder: of the sweep.

    Attributes:
        started: whether the sweep has begun, so that the file stays.
    """

    def __init__(self, folder: Path) -> None:
        self.started = False
        self._path = folder / FILE
        self._before = self._path.read_bytes() if self._path.is_file() else None
        self._new = [path for path in (folder, *folder.parents) if not path.exists()]

    @contextmanager
    def removed_unless_started(self) -> Iterator[None]:
        """Undo what the sweeper has written at the end of the block, unless the sweep has begun."""
        try:
            yield
        finally:
            if not self.started:
                self._undo()

    def _undo(self) -> None:
        """Write or remove the file, and remove the folders that were made for it."""
        if self._before is not None:
            self._path.write_bytes(self._before)
            return
        self._path.unlink(missing_ok=True)
        for folder in self._new:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def compose_once(load: Load, multirun: MultirunFile) -> Load:
    """Return a function that composes each point once: the sweeper composes all of them, and then the launcher needs them.

    Args:
        load: composes a point; a point that does not compose ends the sweep.
        multirun: the file of the sweep.
    """
    kept: dict[tuple[str, ...], DictConfig] = {}

    def load_once(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        key = tuple(sweep_overrides)
        if key in kept:
            return kept.pop(key)
        try:
            return kept.setdefault(key, load(master_config, sweep_overrides))
        except BaseException:
            with multirun.removed_unless_started():
                raise

    return load_once


def without_repeated(job_overrides: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return the overrides of different points, of which some may be listed twice."""
    return list({tuple(filter_overrides(overrides)): overrides for overrides in job_overrides}.values())
