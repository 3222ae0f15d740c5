"""data.stage_in: token shards are copied to storage of the node before they are read, once for all ranks of the node.

A rank that finds another one copying waits for its lock. The copy is named by a hash of the folder and its manifest, so that the next
start of the ranks on this node, and other runs with the same data, find it. Its shards have the checksums of the manifest.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from pipeline.common import artifact
from pipeline.common.artifact import MANIFEST
from pipeline.common.atomic_files import digest, partial_folder, publish_folder, report_disk_full
from pipeline.common.errors import UserError, Violation
from pipeline.common.remote import RemotePath, is_remote, located
from pipeline.config.data import DataConfig
from pipeline.data.load.retries import Retries

log = logging.getLogger("pipeline")

#: Bytes that must remain free on the storage of the node, of what is free before the copy.
_SPARE = 0.02
#: Shards that are copied at once.
_AT_ONCE = 4


def staged(data: DataConfig, *, examples: bool = False, only_urls: bool = False, split: str | None = None) -> DataConfig:
    """Return the configuration with the folders of the copies in place of data.tokens and data.blend.*.tokens.

    Args:
        data: of the run; without stage_in it is returned as it is.
        examples: the run reads data.instructions, of which only the folder of shards is copied.
        only_urls: folders are read where they are.
        split: of a URL only the shards of this split are copied; default: all.

    Raises:
        UserError: data.stage_in is not a folder, or has no space for the shards; a URL cannot be read, or lacks shards.
        UnreadableFile: an object cannot be downloaded for a minute.
    """
    if data.stage_in is None:
        return data
    copies: dict[str, str] = {}

    def copy(folder: str, key: str = "data.tokens") -> str:
        if folder not in copies:
            copies[folder] = folder
            if is_remote(folder) or (not only_urls and (Path(folder) / MANIFEST).is_file()):
                copies[folder] = str(_copied(located(folder, key), key, _root(str(data.stage_in)), split))
        return copies[folder]

    if examples:
        tokens = data.instructions.tokens
        return dataclasses.replace(data, instructions=dataclasses.replace(data.instructions, tokens=copy(tokens) if tokens else tokens))
    tokenized = {name: str(corpus.tokens) for name, corpus in data.blend.items() if corpus.tokens}
    blend = {name: dataclasses.replace(data.blend[name], tokens=copy(of, f"data.blend.{name}.tokens")) for name, of in tokenized.items()}
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


def _copied(folder: Path | RemotePath, key: str, root: Path, split: str | None) -> Path:
    """The copy of a folder of token shards, made by one rank of the node unless it is there; one that was interrupted is continued."""
    retries = Retries()
    manifest = retries.read(folder, lambda: artifact.read(folder, key=key, stage="tokenize"))
    shards = {name: entry for name, entry in manifest.files.items() if split in (None, entry.get("split"))}
    where = folder.resolve() if isinstance(folder, Path) else folder
    identity = f"{where}\0{split}\0{json.dumps(dataclasses.asdict(manifest), sort_keys=True)}"
    copy = root / f"tannschen-{os.getuid()}-{xxhash.xxh3_64_hexdigest(os.fsencode(identity))}"
    if copy.is_dir():
        return copy
    with report_disk_full(root, "data.stage_in"), open(root / f".{copy.name}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if copy.is_dir():
            return copy
        new = partial_folder(copy)
        missing = {name: entry for name, entry in shards.items() if not (new / name).is_file()}
        size, free = sum(entry["bytes"] for entry in missing.values()), shutil.disk_usage(root).free
        if size > free * (1 - _SPARE):
            rule = f"has {free / 1e9:,.1f} GB free on {os.uname().nodename}, and {folder} has {size / 1e9:,.1f} GB"
            fix = ("remove data.stage_in, or " if isinstance(folder, Path) else "") + "name a folder with more space"
            raise UserError.of("data.stage_in", root, rule, fix)
        UserError.raise_for(_damaged(folder, key, missing, retries.read(folder, lambda: _sizes(folder))))
        began = time.monotonic()
        new.mkdir(exist_ok=True)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                for done in [pool.submit(_copy, folder / name, entry, new / name, retries) for name, entry in missing.items()]:
                    done.result()
            except BaseException as error:
                pool.shutdown(cancel_futures=True)
                if isinstance(error, UserError):  # a full disk, which others need as well
                    shutil.rmtree(new)
                raise
        artifact.write(new, manifest)
        publish_folder(new, copy)
        log.info("%s: copied to %s, %.1f GB in %.0f s", folder, copy, size / 1e9, time.monotonic() - began)
    return copy


def _sizes(folder: Path | RemotePath) -> dict[str, int | None]:
    """The size of every file of a folder in bytes, None if a server does not tell it."""
    return {path.name: path.stat().st_size for path in folder.iterdir()} if isinstance(folder, Path) else folder.sizes()


def _damaged(folder: Path | RemotePath, key: str, shards: dict[str, Any], found: dict[str, int | None]) -> Iterator[Violation]:
    """Yield the shards that are missing, or do not have the size of their entries."""
    for name, entry in shards.items():
        if (size := found.get(name, 0)) not in (entry["bytes"], None):
            rule = f"is truncated or overwritten: {size} bytes, {entry['bytes']} were written" if name in found else "is missing"
            yield Violation(key, folder / name, rule, f"remove {folder} and run stage=tokenize again, or copy this file again")


def _copy(shard: Path | RemotePath, entry: dict[str, Any], copy: Path, retries: Retries) -> None:
    """Copy a shard, which has its name only when its checksum is that of its entry."""
    part = copy.with_name(f".{copy.name}.part")

    def attempt() -> None:
        with report_disk_full(part.parents[1], "data.stage_in", "it begins again"):
            shutil.copyfile(shard, part) if isinstance(shard, Path) else shard.get(part)
        if (part.stat().st_size, digest(part)) != (entry["bytes"], entry["xxh3"]):
            raise OSError("its checksum is not that of the manifest")

    retries.read(shard, attempt)
    os.replace(part, copy)
