"""Objects in object storage by their URL, through fsspec: what artifacts need of pathlib.Path, and errors of the protocols as messages."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError

#: What servers of S3 say of a bucket that is not there.
_NO_BUCKET = re.compile("bucket does not exist|NoSuchBucket")


class Unreachable(UserError):  # noqa: N818 - a state
    """An object that cannot be read or written, for a reason that may pass."""

    @property
    def strerror(self) -> str:
        """The reason, as of an OSError."""
        return self.violations[0].rule.partition(": ")[2]


def is_remote(path: object) -> bool:
    """Whether a path is a URL, which is read through fsspec."""
    return "://" in str(path)


def located(path: str, key: str) -> Path | RemotePath:
    """Return the place that a configuration key names."""
    return RemotePath(path, key) if is_remote(path) else Path(path)


class RemotePath:
    """An object, or the folder of those whose names it begins. Methods are those of pathlib.Path, and raise FileNotFoundError as they do.

    Args:
        key: the configuration key that names it, for messages.

    Raises:
        UserError: of all methods: the URL, the credentials or a package is wrong; Unreachable: anything else.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url, self.key = url.rstrip("/"), key
        self.name = self._url.rpartition("/")[2]
        try:
            from fsspec.core import url_to_fs

            self._system, self._path = url_to_fs(self._url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            fix = "write s3://BUCKET/FOLDER, or that of another protocol; pip install '.[remote]' and its package, such as s3fs"
            raise UserError.of(key, url, f"cannot be opened: {error}", fix) from error

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}", self.key)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system."""
        try:
            return getattr(self._system, method)(*arguments, **options)
        except Exception as error:  # every protocol raises its own exception types
            reason = str(error) or type(error).__name__
            no_credentials = not isinstance(error, OSError) and "credential" in reason.lower()
            kind: type[UserError] = Unreachable
            fix = "run the same command again; what is complete is kept"
            if isinstance(error, PermissionError) or no_credentials or _NO_BUCKET.search(reason):
                kind, fix = (
                    UserError,
                    f"correct {self.key}, or the credentials: of S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws",
                )
            elif isinstance(error, FileNotFoundError) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise kind.of(self.key, self, f"cannot be accessed: {reason}", fix) from error

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the content of the object."""
        return self._call("cat_file", self._path).decode(encoding)

    def is_file(self) -> bool:
        """Return whether there is the object."""
        try:
            return self._call("info", self._path)["type"] == "file"
        except FileNotFoundError:
            return False

    def sizes(self) -> dict[str, int | None]:
        """Return the name of every object of the folder and its size in bytes, None if the server does not tell it."""
        infos = self._call("find", self._path, detail=True)
        return {name.removeprefix(f"{self._path}/"): info.get("size") for name, info in infos.items()}

    def get(self, path: Path) -> None:
        """Copy the object to a local file."""
        self._call("get_file", self._path, str(path))

    def put(self, path: Path) -> None:
        """Copy a local file to the object, which appears as a whole."""
        try:
            self._call("put_file", str(path), self._path)
        except FileNotFoundError as error:  # of a protocol with folders, such as sftp
            fix = f"set {self.key} to object storage, or to a folder, and copy that"
            raise UserError.of(self.key, self, f"cannot be written: {error}", fix) from error

    def remove(self) -> None:
        """Remove the objects of the folder."""
        with suppress(FileNotFoundError):
            self._call("rm", self._path, recursive=True)
