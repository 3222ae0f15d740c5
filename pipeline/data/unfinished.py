"""What an interrupted stage leaves for its rerun: `.unfinished/` in the output folder, one note for every part that is complete."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pipeline.files import atomic_file, make_folder


class Unfinished:
    """Notes of finished parts. They count only for the settings they were made with.

    Args:
        folder: the output folder.
        settings: all that determines the content, as in the manifest.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.output = folder
        self.folder = folder / ".unfinished"
        self._settings = json.loads(json.dumps(settings))

    def take_over(self) -> None:
        """Keep an interrupted run's parts if they fit, remove what does not. One rank calls this before the others go on."""
        make_folder(self.output)
        for partial in self.output.glob(".*.partial"):
            partial.unlink()
        if self.note("settings") != self._settings:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.write("settings", self._settings)

    def note(self, name: str) -> Any:
        """What was noted of a finished part, None if it is still to do."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def write(self, name: str, note: Any) -> None:
        """Note that a part is complete."""
        with atomic_file(self.folder / f"{name}.json", "w") as handle:
            json.dump(note, handle)

    def clear(self) -> None:
        """The stage is finished: forget the notes."""
        shutil.rmtree(self.folder, ignore_errors=True)


def remove_strangers(folder: Path, pattern: str, names: set[str]) -> None:
    """Remove the shards of an earlier run that the new manifest does not name, so that nobody reads them by a glob."""
    for path in folder.glob(pattern):
        if path.name not in names:
            path.unlink()
