"""data.stage_in: token shards are copied to storage of the node before they are read, once for all ranks of the node.

A rank that finds another one copying waits for its lock. The copy is named by a hash of the folder and its manifest, so that the next
start of the ranks on this node, and other runs with the same data, find it. Its shards have the checksums of the manifest (data.verify).
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import shutil
import time
from pathlib import Path

import xxhash

from pipeline.common.artifact import MANIFEST
from pipeline.common.atomic_files import atomic_folder, report_disk_full
from pipeline.common.errors import UserError
from pipeline.config.data import DataConfig

log = logging.getLogger("pipeline")

#: Bytes that must remain free on the storage of the node, of what is free before the copy.
_SPARE = 0.02


def staged(data: DataConfig, *, examples: bool = False) -> DataConfig:
    """Return the configuration with the folders of the copies in place of data.tokens and data.blend.*.tokens.

    Args:
        data: of the run; without stage_in it is returned as it is.
        examples: the run reads data.instructions, of which only the folder of shards is copied.

    Raises:
        UserError: data.stage_in is not a folder, or has no space for the shards.
    """
    if data.stage_in is None:
        return data
    root = _root(data.stage_in)
    copies: dict[str, str] = {}

    def copy(folder: str) -> str:
        if folder not in copies:
            copies[folder] = str(_copied(Path(folder), root)) if (Path(folder) / MANIFEST).is_file() else folder
        return copies[folder]

    if examples:
        tokens = data.instructions.tokens
        return dataclasses.replace(data, instructions=dataclasses.replace(data.instructions, tokens=copy(tokens) if tokens else tokens))
    tokenized = [name for name, corpus in data.blend.items() if corpus.tokens]
    blend = {name: dataclasses.replace(data.blend[name], tokens=copy(str(data.blend[name].tokens))) for name in tokenized}
    tokens = data.tokens if data.blend and len(tokenized) == len(data.blend) else copy(data.tokens)
    return dataclasses.replace(data, tokens=tokens, blend={**data.blend, **blend})


def _root(stage_in: str) -> Path:
    """The folder on the node, with the values of environment variables, which are those of the job."""
    root = Path(os.path.expandvars(stage_in))
    if "$" in str(root):
        rule = f"has a variable that is not set in the job on {os.uname().nodename}"
        raise UserError.of("data.stage_in", stage_in, rule, "name a folder of the node, such as /tmp or $TMPDIR")
    if not root.is_dir():
        fix = "name a folder on storage of the node, such as /tmp or $TMPDIR"
        raise UserError.of("data.stage_in", stage_in, f"is not a folder on {os.uname().nodename}", fix)
    return root


def _copied(folder: Path, root: Path) -> Path:
    """The copy of a folder of token shards, made unless it is there."""
    manifest = (folder / MANIFEST).read_bytes()
    name = xxhash.xxh3_64_hexdigest(bytes(folder.resolve()) + b"\0" + manifest)
    copy = root / f"tannschen-{os.getuid()}-{name}"
    if copy.is_dir():
        return copy
    with report_disk_full(root, "data.stage_in"), open(root / f".{copy.name}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if copy.is_dir():
            return copy
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        free = shutil.disk_usage(root).free
        if size > free * (1 - _SPARE):
            rule = f"has {free / 1e9:,.1f} GB free on {os.uname().nodename}, and {folder} has {size / 1e9:,.1f} GB"
            raise UserError.of("data.stage_in", root, rule, "remove data.stage_in, or name a folder with more space")
        began = time.monotonic()
        with atomic_folder(copy) as new:
            shutil.copytree(folder, new, dirs_exist_ok=True)
        log.info("%s: copied to %s, %.1f GB in %.0f s", folder, copy, size / 1e9, time.monotonic() - began)
    return copy
