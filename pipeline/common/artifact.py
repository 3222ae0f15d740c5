"""Artifacts: the output folders of stages. A manifest records the stage, its settings, its inputs and a checksum per file.

The manifest is written last and atomically: a folder with a manifest is complete.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import xxhash

from pipeline.common.atomic_files import digest, verified_reader, verify, write_json
from pipeline.common.errors import UserError, Violation
from pipeline.common.remote import RemotePath

MANIFEST = "manifest.json"


@dataclass
class Manifest:
    """The description of the output of a stage.

    Attributes:
        settings: dotted configuration key -> value, for every key that determines the content.
        files: file name -> {"bytes", "xxh3", ...}, for every file of the artifact.
        totals: counts for later stages and for users (documents, bytes, tokens, ...).
    """

    stage: str
    settings: dict[str, Any]
    files: dict[str, dict[str, Any]]
    totals: dict[str, Any] = field(default_factory=dict)


def entry(path: Path, **metadata: Any) -> dict[str, Any]:
    """Return the manifest entry of a file: its size in bytes, its checksum, and the given metadata."""
    return {"bytes": path.stat().st_size, "xxh3": digest(path), **metadata}


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest entries of all files of a folder and its subfolders."""
    return {file.relative_to(folder).as_posix(): entry(file) for file in sorted(folder.rglob("*")) if file.is_file()}


def write(folder: Path | RemotePath, manifest: Manifest) -> None:
    """Write the manifest atomically, which marks the folder as complete."""
    write_json(folder / MANIFEST, dataclasses.asdict(manifest), sort_keys=True)


def fingerprint(manifest: Manifest) -> str:
    """Return a hash of all file checksums. Artifacts derived from this one record it in their settings."""
    listing = sorted((name, recorded["xxh3"]) for name, recorded in manifest.files.items())
    return xxhash.xxh3_64_hexdigest(json.dumps(listing).encode())


def read(folder: Path | RemotePath, *, key: str, stage: str, more: str = "") -> Manifest:
    """Read the manifest of a folder.

    Args:
        folder: the output folder of `stage`.
        key: configuration key that names the folder, for error messages.
        stage: the stage that must have written the folder.
        more: settings with which it writes there, if that is not `key`.

    Raises:
        UserError: the folder is missing or incomplete, or was written by another stage or program.
    """
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        rule = f"contains no complete output of stage={stage}"
        fix = f"correct {key}, or run stage={stage} with {more or key}={folder} first"
        raise UserError.of(key, folder, rule, fix) from error
    except (ValueError, TypeError) as error:
        rule = f"contains a {MANIFEST} that no stage wrote, or that is damaged: {error}"
        raise UserError.of(key, folder, rule, f"set {key} to another folder, or remove this one") from error
    if manifest.stage != stage:
        raise UserError.of(
            key, folder, f"was written by stage={manifest.stage}, not by stage={stage}", f"set {key} to a folder written by stage={stage}"
        )
    return manifest


def find_complete(folder: Path | RemotePath, *, key: str, stage: str, settings: dict[str, Any]) -> Manifest | None:
    """Return the manifest of a folder that is already complete with these settings, None if the folder is incomplete.

    Raises:
        UserError: the folder is complete but was created with other settings; lists every difference.
    """
    if not (folder / MANIFEST).is_file():
        return None
    manifest = read(folder, key=key, stage=stage)
    check_settings(manifest.settings, settings, f"{folder} was created with", f"set {key} to another folder, or remove this one")
    return manifest


def check_empty(folder: Path, *, key: str, stage: str) -> None:
    """Refuse to replace files that a stage did not write.

    Raises:
        UserError: the folder contains files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        rule = f"contains files that stage={stage} did not write"
        raise UserError.of(key, folder, rule, f"set {key} to another folder, or remove this one")


SHOWN_DIFFERENCES = 20
"""Maximum number of settings that check_settings lists."""


def check_settings(recorded: dict[str, Any], settings: dict[str, Any], made_with: str, fix: str) -> None:
    """Compare settings with those that a folder was written with.

    Args:
        recorded: settings read from the folder.
        made_with: precedes the recorded setting in the message.

    Raises:
        UserError: they differ; lists the differences.
    """
    settings = json.loads(json.dumps(settings))
    differences = [
        Violation(name, settings.get(name), f"{made_with} {name}={recorded.get(name)}", fix)
        for name in sorted(settings.keys() | recorded.keys())
        if settings.get(name) != recorded.get(name)
    ]
    if len(differences) > SHOWN_DIFFERENCES:
        more = Violation("...", "...", f"{len(differences) - SHOWN_DIFFERENCES + 1} further settings differ", fix)
        differences = [*differences[: SHOWN_DIFFERENCES - 1], more]
    UserError.raise_for(differences)


def open_verified(folder: Path, manifest: Manifest, name: str) -> AbstractContextManager[IO[bytes]]:
    """Open a file of an artifact for one sequential read; its checksum is verified when the block ends (files.verified_reader).

    Raises:
        UserError: the file is missing, truncated or corrupt.
    """
    recorded = manifest.files[name]
    return verified_reader(folder / name, recorded["bytes"], recorded["xxh3"], _fix(folder, manifest))


def verify_files(folder: Path, manifest: Manifest, names: list[str] | None = None) -> None:
    """Verify the checksums of the named files of an artifact, of all files if names is None.

    Raises:
        UserError: a file is missing, truncated or corrupt; the message names it.
    """
    for name in manifest.files if names is None else names:
        recorded = manifest.files[name]
        verify(folder / name, recorded["bytes"], recorded["xxh3"], _fix(folder, manifest))


def _fix(folder: Path, manifest: Manifest) -> str:
    """Return the advice for a damaged file."""
    return f"remove {folder} and run stage={manifest.stage} again"
