"""A server of S3 for tests: moto's, with requests counted, refused and failing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

KEY = "right"
"""The access key that the server accepts."""


class Server:
    """A server of this process.

    Attributes:
        requests: (method, path) of every request.
        failing: called with each (method, path); True is answered by "503 Service Unavailable".
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.requests: list[tuple[str, str]] = []
        self.failing: Callable[[str, str], bool] = lambda *_: False
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append(request)
        status = ""
        if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            status, code = "403 Forbidden", "InvalidAccessKeyId"
        elif self.failing(*request):
            status, code = "503 Service Unavailable", "SlowDown"
        if not status:
            return self._moto(environ, start)
        body = b"" if request[0] == "HEAD" else f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def gets(self, ending: str) -> int:
        """The number of objects that were read, by the end of their names."""
        return sum(method == "GET" and path.endswith(ending) for method, path in self.requests)


@contextmanager
def serving() -> Iterator[Server]:
    """A server, with the variables that lead to it, and a bucket named `bucket`."""
    server = Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ENDPOINT_URL": server.url, "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": "secret", "REGION": "x"}.items():
            patch.setenv(f"AWS_{name}", value)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        fsspec.filesystem("s3").mkdir("bucket")
        yield server
    server.close()


def fill(folder: Path, url: str) -> str:
    """Copy the files of a folder to a URL."""
    for path in folder.iterdir():
        fsspec.filesystem("s3").put_file(str(path), f"{url}/{path.name}")
    return url


def content(url: str) -> dict[str, bytes]:
    """The bytes of the objects below a URL, by name."""
    system = fsspec.filesystem("s3", use_listings_cache=False)
    return {name.rpartition("/")[2]: system.cat_file(name) for name in system.find(url)}
