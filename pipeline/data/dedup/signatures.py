"""Signature files next to the shards of a corpus: a later corpus can be deduplicated against it without its texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from pipeline.common import artifact
from pipeline.common.artifact import Manifest
from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.common.mpi import Comm
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import minhash

PREFIX, SUFFIX = "signatures-", ".safetensors"
"""Of the file names; the name of the shard, without its suffix, is between them."""

# Document d of file f has the number _FIRST + f * 2**_FILE_BITS + d, which is below all numbers of the corpus itself.
_FIRST, _FILE_BITS = -(1 << 62), 32


@dataclass(frozen=True)
class Known:
    """One rank's part of the documents in dedup.against.

    Attributes:
        numbers: (n,) int64 below 0, sorted, independent of the number of ranks.
        keys: (n, 2) uint64, exact.keys of the texts.
        signatures: (n, permutations) uint32.
    """

    numbers: np.ndarray
    keys: np.ndarray
    signatures: np.ndarray

    @classmethod
    def nothing(cls, permutations: int) -> Known:
        """Return an empty set of documents."""
        return cls(np.empty(0, np.int64), np.empty((0, 2), np.uint64), np.empty((0, permutations), np.uint32))


def write(path: Path, keys: np.ndarray, signatures: np.ndarray, settings: DedupConfig) -> dict[str, Any]:
    """Save keys and signatures of the documents of a shard: 16 + 4 x permutations bytes each (528 for 128 permutations).

    Args:
        keys: (n, 2) uint64, exact.keys of the texts.
        signatures: (n, permutations) uint32.
    """
    # safetensors saves the underlying memory of an array, including gaps between rows of a strided view.
    columns = {"keys": np.ascontiguousarray(keys), "signatures": np.ascontiguousarray(signatures)}
    content = save(columns, {"made": _description(settings)})
    with atomic_file(path) as handle:
        handle.write(content)
    return artifact.entry(path, documents=len(keys))


def load(comm: Comm, settings: DedupConfig) -> Known:
    """Load this rank's part of the signatures in the folders of dedup.against; each file is read by one rank. Collective.

    Raises:
        UserError: a folder has no signatures, they were computed with other settings, or a file is damaged.
    """
    listed = comm.bcast(files(settings.against) if comm.rank == 0 else None)
    parts = [Known.nothing(settings.permutations)]
    for number, (folder, manifest, name) in list(enumerate(listed))[comm.rank :: comm.size]:
        artifact.verify_files(folder, manifest, [name])
        with safe_open(folder / name, "numpy") as content:
            made = content.metadata()["made"]
            if made != _description(settings):
                fix = f"shard {folder} again with these settings, or set dedup.shingle, dedup.bands and dedup.rows to those of the folder"
                rule = f"contains signatures computed with {made}; required: {_description(settings)}"
                raise UserError.of("dedup.against", folder / name, rule, fix)
            keys, signatures = content.get_tensor("keys"), content.get_tensor("signatures")
        parts.append(Known(_FIRST + (number << _FILE_BITS) + np.arange(len(keys)), keys, signatures))
    columns = [[vars(part)[name] for part in parts] for name in ("numbers", "keys", "signatures")]
    return Known(*map(np.concatenate, columns))


def files(folders: Sequence[str]) -> list[tuple[Path, Manifest, str]]:
    """List all signature files: (folder, manifest, file name)."""
    loaded = []
    for folder in map(Path, folders):
        manifest = artifact.read(folder, key="dedup.against", stage="shard", more="dedup.save_signatures=true data.shards")
        names = sorted(name for name in manifest.files if name.startswith(PREFIX))
        if not names:
            fix = "shard it with dedup.save_signatures=true, or remove it from the list"
            raise UserError.of("dedup.against", folder, "contains no signatures", fix)
        loaded += [(folder, manifest, name) for name in names]
    return loaded


def _description(settings: DedupConfig) -> str:
    """The settings that must match for signatures to be comparable."""
    return f"{minhash.ALGORITHM}, {settings.permutations} permutations (dedup.bands x dedup.rows), {settings.shingle} words (dedup.shingle)"
