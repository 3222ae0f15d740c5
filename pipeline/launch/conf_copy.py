"""The copy of the configuration files that submitted jobs read: those of the time of the submission, and of --config-dir."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from pipeline.common.atomic_files import atomic_folder
from pipeline.common.errors import UserError
from pipeline.config.paths import CONF_DIR

#: A user's own folder is a few groups of files; more is another folder, such as the root of a file system.
MOST_FILES = 2000


def hashed(folder: Path, own: Sequence[Path]) -> Path:
    """Return the folder for a copy inside of `folder`, named after the content of the files.

    Args:
        folder: of the sweep.
        own: a user's own folders with configuration files.

    Raises:
        UserError: as `files`.
    """
    content = xxhash.xxh3_64()
    for name, path in sorted(files(own).items()):
        content.update(f"{name}\n".encode() + path.read_bytes())
    return (folder / f".conf-{content.hexdigest()}").absolute()


def files(own: Sequence[Path]) -> dict[str, Path]:
    """Return the configuration files: name in the copy -> file. Those of conf/ come before a user's own, as in Hydra's search path.

    Raises:
        UserError: a user's own folder has too many files.
    """
    found: dict[str, Path] = {}
    for source in [*reversed(own), CONF_DIR]:
        for number, path in enumerate(_yaml(source)):
            if number >= MOST_FILES:
                rule = f"has more than {MOST_FILES:,} .yaml files, and jobs read a copy of them"
                raise UserError.of("argument", f"--config-dir={source}", rule, "name a folder with experiment/NAME.yaml and no other files")
            found[path.relative_to(source).as_posix()] = path
    return found


def _yaml(source: Path) -> Iterator[Path]:
    """Yield the configuration files of a folder; hidden folders are copies of earlier submissions, and environments."""
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".yaml"))


def write(conf: Path, own: Sequence[Path]) -> None:
    """Write the copy, which appears with all of its files, unless it exists.

    Args:
        conf: the folder of the copy.
        own: a user's own folders with configuration files.

    Raises:
        UserError: as `files`.
    """
    if not conf.is_dir():
        with atomic_folder(conf) as folder:
            copy(folder, own)


def copy(folder: Path, own: Sequence[Path]) -> None:
    """Copy the files to a folder; arguments and errors as those of `write`."""
    for name, path in files(own).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
