"""Files that appear whole or not at all, and their checksums."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import xxhash

from pipeline.errors import UserError


@contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[IO]:
    """A file handle whose content appears under `path` when the block ends well, and nowhere when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, mode, encoding=None if "b" in mode else "utf-8") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder for output, with its parents.

    Raises:
        UserError: that cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError.of(
            "output folder", folder, f"cannot be written: {error.strerror}", "choose a place that you may write to"
        ) from error


@contextmanager
def report_disk_full(folder: Path) -> Iterator[None]:
    """Writing into `folder`: a full disk, quota or file-size limit becomes one message that names it.

    Raises:
        UserError: instead of that OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        fix = "make room and run the same command again; finished parts are kept"
        raise UserError.of("output folder", folder, f"cannot be written: {error.strerror}", fix) from error


def publish_folder(partial: Path, final: Path) -> None:
    """Give a finished folder its name, replacing an older one. Readers see the old folder or the new one, never a mixture."""
    retired = final.with_name(f".{final.name}.retired")
    if final.exists():
        shutil.rmtree(retired, ignore_errors=True)
        os.rename(final, retired)
    os.rename(partial, final)
    sync_folder(final.parent)
    shutil.rmtree(retired, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to its file system, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """The xxh3-128 checksum of a file's bytes, in hexadecimal."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def verify(path: Path, size: int, checksum: str, remedy: str) -> None:
    """Hold a file against what was noted when it was written.

    Raises:
        UserError: it is missing, has another length, or other bytes; `remedy` is the advice.
    """
    if not path.is_file():
        raise UserError.of("file", path, "is missing", remedy)
    if path.stat().st_size != size:
        raise UserError.of("file", path, f"is truncated or overwritten: {path.stat().st_size} bytes, {size} were written", remedy)
    if digest(path) != checksum:
        raise _corrupt(path, checksum, remedy)


def _corrupt(path: Path, checksum: str, remedy: str) -> UserError:
    return UserError.of("file", path, f"is corrupt: its checksum is not {checksum}", remedy)


@contextmanager
def verified_reader(path: Path, size: int, checksum: str, remedy: str) -> Iterator[IO[bytes]]:
    """A file to be read once, from its start: what is read is held against what was noted when it was written.

    The block must not publish what it makes of the bytes: whether they are right is known when it has ended.

    Raises:
        UserError: as verify() does; also instead of whatever the block raised over corrupt bytes.
    """
    if not path.is_file() or path.stat().st_size != size:
        verify(path, size, checksum, remedy)
    raw = _Hashed(path)
    with io.BufferedReader(raw, 1 << 20) as handle:
        try:
            yield handle
        except Exception:
            verify(path, size, checksum, remedy)
            raise
        while handle.read(1 << 20):
            pass
        if raw.state.hexdigest() != checksum:
            raise _corrupt(path, checksum, remedy)


class _Hashed(io.RawIOBase):
    """A file whose bytes are added to a checksum as they are read."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.state = xxhash.xxh3_128()
        self._handle = open(path, "rb", buffering=0)  # noqa: SIM115 (close() closes it)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._handle.readinto(buffer)
        self.state.update(memoryview(buffer)[:count])
        return count

    def close(self) -> None:
        self._handle.close()
        super().close()
