"""Atomic file writes and checksums."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import xxhash

from pipeline.common.errors import UserError
from pipeline.common.remote import RemotePath

#: What the system says of an output that cannot grow, or be created: a full disk, a quota, a file-size limit, a read-only file system.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class OutputError(OSError):
    """An output file or folder that cannot be created, which tells nothing of the inputs: no permission, or not a place for files."""


def kind(info: os.stat_result) -> str:
    """What a path is, for messages: "a FIFO", "a socket", "a device", "a folder" or "a file"."""
    kinds = {stat.S_IFIFO: "a FIFO (named pipe)", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(info.st_mode), "a device")


@contextmanager
def atomic_file(path: Path | RemotePath, mode: str = "wb", *, parents: bool = True) -> Iterator[IO]:
    """Open a temporary file that replaces `path` when the block succeeds and is deleted when the block raises.

    That of a URL is in the folder of Python's tempfile ($TMPDIR).

    Args:
        parents: create the folder if it is missing. Files of a folder that a user may rename meanwhile set it to False.
    """
    if isinstance(path, RemotePath):
        with tempfile.NamedTemporaryFile(mode, encoding=None if "b" in mode else "utf-8") as handle:
            yield handle
            handle.flush()
            path.put(Path(handle.name))
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with _creating():
            if parents:
                path.parent.mkdir(parents=True, exist_ok=True)
            opened = open(partial, mode, encoding=None if "b" in mode else "utf-8")  # noqa: SIM115 (closed below)
        with opened as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        folder = os.open(path.parent, os.O_RDONLY)  # who waits for the file may rename its folder as soon as it appears
        try:
            os.replace(partial, path)
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        with suppress(OSError):  # the error of the block tells more: a read-only file system, a file in the place of a folder
            partial.unlink(missing_ok=True)


def write_json(path: Path | RemotePath, content: Any, **options: Any) -> None:
    """Write values as JSON with indents and a line end, atomically; `options` are those of json.dumps."""
    with atomic_file(path, "w") as handle:
        handle.write(json.dumps(content, indent=1, **options) + "\n")


@contextmanager
def _creating() -> Iterator[None]:
    """Tell the errors of creating an output from those of reading.

    Raises:
        OutputError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(error.errno, error.strerror, error.filename) from error


def apply_umask(path: Path) -> None:
    """Give a file the mode that the umask leaves, which its folder has; safetensors creates files that only their owner may read."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def make_folder(folder: Path, key: str = "output folder") -> None:
    """Create an output folder and its parents.

    Args:
        key: what names it, for the message.

    Raises:
        UserError: the folder cannot be created, or no file can be created in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # permission bits tell nothing of a read-only file system, or of /proc
            pass
    except OSError as error:
        raise UserError.of(key, folder, f"cannot be written: {error.strerror}", advice(os.strerror(error.errno or 0))) from error


@contextmanager
def report_disk_full(folder: Path, key: str = "output folder", then: str = "completed parts are kept") -> Iterator[None]:
    """Convert the error of an output that cannot be written into a UserError that names `folder`.

    These are a full disk, an exceeded quota, a file-size limit, a read-only file system, and files that cannot be created.

    Args:
        key: what names it, for the message.
        then: what the same command does when there is space again, for the message.

    Raises:
        UserError: in place of that OSError, or of an error that a library raised because of it.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or (unwritable := _unwritable(error)) is None:
            raise
        cause, reason = unwritable
        if isinstance(cause.filename, str) and not Path(cause.filename).resolve().is_relative_to(folder.resolve().parent):
            folder = Path(cause.filename).parent
        raise UserError.of(key, folder, f"cannot be written: {reason}", advice(os.strerror(cause.errno or 0), then)) from error


def is_full(reason: str) -> bool:
    """Return whether a reason is that of a full disk, a quota or a file-size limit, by what the system says."""
    return any(os.strerror(number) in reason for number in _UNWRITABLE if number != errno.EROFS)


def advice(reason: str, then: str = "completed parts are kept") -> str:
    """Return the fix for an output that cannot be written, by what the system says; `then` is what the same command does afterwards."""
    if is_full(reason):
        return f"free disk space or quota and run the same command again; {then}"
    return f"choose a folder with write permission, or restore it and run the same command again; {then}"


def _unwritable(error: BaseException) -> tuple[OSError, str] | None:
    """Return the error of an output that cannot be written, if an error is or arose from such a one, and what the system says."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OutputError) or (isinstance(cause, OSError) and cause.errno in _UNWRITABLE):
            return cause, cause.strerror or str(cause)
        # safetensors and other packages in Rust raise errors of their own
        if (match := re.search(r"\(os error (\d+)\)", str(cause))) and int(match[1]) in _UNWRITABLE:
            return OSError(int(match[1]), ""), os.strerror(int(match[1]))
        # numpy.ndarray.tofile, for GGUF
        if getattr(cause, "errno", None) is None and re.search(r"\d+ requested and \d+ written", str(cause)):
            return OSError(errno.ENOSPC, ""), f"only a part of the data was written ({cause})"
        cause = cause.__cause__ or cause.__context__
    return None


def partial_folder(final: Path) -> Path:
    """The hidden folder in which atomic_folder collects the content of `final`; pass what `behind_link` returns."""
    return final.with_name(f".{final.name}.partial")


def behind_link(final: Path) -> Path:
    """Return the folder that a symbolic link names, such as an output on another disk: a rename would replace the link itself."""
    return final.resolve() if final.is_symlink() else final


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder whose content appears as `final` if the block succeeds, replacing an older folder; it is removed otherwise.

    Readers see either the old folder or the new one. The leftovers of an interrupted run are removed first.
    """
    final = behind_link(final)
    partial = partial_folder(final)
    shutil.rmtree(partial, ignore_errors=True)
    with _creating():
        partial.mkdir(parents=True)
    try:
        yield partial
        publish_folder(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish_folder(partial: Path, final: Path) -> None:
    """Rename a complete folder to its final name and remove the folder that it replaces."""
    retired = final.with_name(f".{final.name}.retired")
    if final.exists():
        shutil.rmtree(retired, ignore_errors=True)
        os.rename(final, retired)
    os.rename(partial, final)
    sync_folder(final.parent)
    shutil.rmtree(retired, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that no reader sees a part of it if the removal is interrupted."""
    retired = folder.with_name(f".{folder.name}.retired")
    shutil.rmtree(retired, ignore_errors=True)
    os.rename(folder, retired)
    shutil.rmtree(retired)


def remove_leftovers(parent: Path) -> None:
    """Remove what interrupted calls of atomic_file, atomic_folder and remove_folder left in a folder; no other process may write to it."""
    for pattern in (".*.partial", ".*.retired"):
        for path in parent.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk, so that a rename survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size_of(path: Path) -> int | None:
    """The size of a file, bytes; None if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def digest(path: Path) -> str:
    """Return the xxh3-128 checksum of a file in hexadecimal."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def verify(path: Path, size: int, checksum: str, fix: str) -> None:
    """Verify the size and the checksum of a file.

    Args:
        size: expected size, bytes.
        checksum: expected xxh3-128 checksum, hexadecimal.

    Raises:
        UserError: the file is missing, or its size or checksum differs.
    """
    if not path.is_file():
        raise UserError.of("file", path, "is missing", fix)
    if path.stat().st_size != size:
        raise UserError.of("file", path, f"is truncated or overwritten: {path.stat().st_size} bytes, expected {size}", fix)
    if digest(path) != checksum:
        raise _corrupt(path, checksum, fix)


def _corrupt(path: Path, checksum: str, fix: str) -> UserError:
    return UserError.of("file", path, f"is corrupt: its checksum differs from the recorded {checksum}", fix)


@contextmanager
def verified_reader(path: Path, size: int, checksum: str, fix: str) -> Iterator[IO[bytes]]:
    """Open a file for one sequential read and verify its checksum while reading.

    The checksum is known only when the block ends, so the block must not publish results.

    Raises:
        UserError: see verify(); also replaces an exception that the block raised because of corrupt bytes.
    """
    if not path.is_file() or path.stat().st_size != size:
        verify(path, size, checksum, fix)
    raw = _HashingReader(path)
    with io.BufferedReader(raw, 1 << 20) as handle:
        try:
            yield handle
        except Exception:
            verify(path, size, checksum, fix)
            raise
        while handle.read(1 << 20):
            pass
        if raw.state.hexdigest() != checksum:
            raise _corrupt(path, checksum, fix)


class _HashingReader(io.RawIOBase):
    """A raw file that updates a checksum with the bytes read."""

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
