"""Artifacts: a folder of files and a manifest that says which stage made them, from what, with which settings.

The manifest is written last and atomically, so a folder with a manifest is complete.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import xxhash

from pipeline.errors import UserError, Violation
from pipeline.files import atomic_file, digest, verified_reader, verify

MANIFEST = "manifest.json"


@dataclass
class Manifest:
    """What a stage made.

    Attributes:
        stage: the stage that wrote the folder.
        settings: dotted configuration key -> value, all that determined the content.
        files: name in the folder -> {"bytes", "xxh3", ...} for every file the artifact consists of.
        totals: counts that later stages and people read (documents, bytes, tokens, ...).
    """

    stage: str
    settings: dict[str, Any]
    files: dict[str, dict[str, Any]]
    totals: dict[str, Any] = field(default_factory=dict)


def entry(path: Path, **more: Any) -> dict[str, Any]:
    """A manifest's entry for a file: its length in bytes, its checksum, and what else is known of it."""
    return {"bytes": path.stat().st_size, "xxh3": digest(path), **more}


def write(folder: Path, manifest: Manifest) -> None:
    """Declare the folder complete."""
    with atomic_file(folder / MANIFEST, "w") as handle:
        json.dump(dataclasses.asdict(manifest), handle, indent=1, sort_keys=True)
        handle.write("\n")


def fingerprint(manifest: Manifest) -> str:
    """The content of an artifact as a short text, for the settings of what is made from it."""
    listing = sorted((name, noted["xxh3"]) for name, noted in manifest.files.items())
    return xxhash.xxh3_64_hexdigest(json.dumps(listing).encode())


def read(folder: Path, *, key: str, stage: str) -> Manifest:
    """The manifest of a folder that `stage` should have made and that configuration key `key` names.

    Raises:
        UserError: the folder is missing or incomplete, or another stage's.
    """
    if not (folder / MANIFEST).is_file():
        raise UserError.of(key, folder, f"holds no finished {stage} output", f"run stage={stage} with {key}={folder} first")
    manifest = Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    if manifest.stage != stage:
        raise UserError.of(
            key, folder, f"was written by stage={manifest.stage}, not {stage}", f"point {key} to a folder that stage={stage} wrote"
        )
    return manifest


def find_complete(folder: Path, *, key: str, stage: str, settings: dict[str, Any]) -> Manifest | None:
    """The manifest of a folder that is already complete with these settings, None if there is work to do.

    Raises:
        UserError: the folder is complete but was made with other settings; every difference is named.
    """
    if not (folder / MANIFEST).is_file():
        return None
    manifest = read(folder, key=key, stage=stage)
    settings = json.loads(json.dumps(settings))
    differences = [
        Violation(
            name,
            settings.get(name),
            f"{folder} was made with {name}={manifest.settings.get(name)}",
            f"choose another {key}, or remove the folder",
        )
        for name in sorted(settings.keys() | manifest.settings.keys())
        if settings.get(name) != manifest.settings.get(name)
    ]
    if differences:
        raise UserError(differences)
    return manifest


def open_verified(folder: Path, manifest: Manifest, name: str) -> AbstractContextManager[IO[bytes]]:
    """A file of an artifact, to be read once; the block's end holds what was read against its checksum (files.verified_reader).

    Raises:
        UserError: it is missing, truncated or corrupt; it is named.
    """
    noted = manifest.files[name]
    return verified_reader(folder / name, noted["bytes"], noted["xxh3"], _remedy(folder, manifest))


def verify_files(folder: Path, manifest: Manifest, names: list[str] | None = None) -> None:
    """Hold the files of an artifact (or the named ones) against their checksums.

    Raises:
        UserError: one is missing, truncated or corrupt; it is named.
    """
    for name in manifest.files if names is None else names:
        noted = manifest.files[name]
        verify(folder / name, noted["bytes"], noted["xxh3"], _remedy(folder, manifest))


def _remedy(folder: Path, manifest: Manifest) -> str:
    return f"remove {folder / MANIFEST} and run stage={manifest.stage} again"
