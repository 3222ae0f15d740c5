"""The rendezvous store of a job of which only one rank exists: it answers from memory, and counts the requests that this rank makes."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, Store


class CountingStore(Store):
    """A store in memory.

    Attributes:
        requests: name of the method -> number of its calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self._store = HashStore()

    def _count(self, name: str, *arguments: Any) -> Any:
        """Count a request, and answer it."""
        self.requests[name] += 1
        return getattr(self._store, name)(*arguments)

    def set(self, key: str, value: str) -> None:
        """See torch.distributed.Store."""
        self._count("set", key, value)

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store."""
        value: bytes = self._count("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        """See torch.distributed.Store."""
        value: int = self._count("add", key, amount)
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See torch.distributed.Store."""
        value: bytes = self._count("compare_set", key, expected, desired)
        return value

    def check(self, keys: list[str]) -> bool:
        """See torch.distributed.Store."""
        value: bool = self._count("check", keys)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See torch.distributed.Store."""
        self._count("wait", keys, *(() if timeout is None else (timeout,)))

    def delete_key(self, key: str) -> bool:
        """See torch.distributed.Store."""
        value: bool = self._count("delete_key", key)
        return value

    def num_keys(self) -> int:
        """See torch.distributed.Store."""
        value: int = self._count("num_keys")
        return value
