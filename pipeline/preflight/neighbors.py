"""Results of the ranks of one node, gathered by its first rank over a socket of the node: no network and no process group is involved."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any


def _address(step: str, node: str) -> str:
    """An abstract Unix socket, which leaves no file behind."""
    return f"\0tannschen-preflight-{step}-{node}"


class Gathering:
    """The first rank's end; it must exist before the others send, who wait for it.

    Args:
        step: node_result.step_id().
        node: name of this node.
    """

    def __init__(self, step: str, node: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(_address(step, node))
        self._socket.listen(1024)

    def receive(self, count: int, seconds: float) -> list[dict[str, Any]]:
        """Wait for so many results, and return those that arrived in time."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + seconds
        while len(found) < count and (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                break
            with connection, contextlib.suppress(OSError, ValueError):  # a rank that died while it sent
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                found.append(json.loads(_all(connection)))
        return found

    def close(self) -> None:
        """Release the address."""
        self._socket.close()


def _all(connection: socket.socket) -> bytes:
    """What a rank sends until it closes the connection."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def send(step: str, node: str, result: dict[str, Any], seconds: float) -> bool:
    """Send the result of a rank to the first rank of its node, and return whether it was there in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.settimeout(seconds)
            connection.connect(_address(step, node))
            connection.sendall(json.dumps(result).encode())
            return True
        time.sleep(0.05)
    return False
