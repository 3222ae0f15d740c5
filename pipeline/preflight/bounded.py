"""Calls that may never return, such as those of a file system or a name server that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any


def bounded(calls: Mapping[str, Callable[[], Any]], seconds: float, otherwise: Any) -> dict[str, Any]:
    """Run calls at once, each in a thread of its own; name -> result, or `otherwise` for one that takes longer.

    The thread of such a call goes on, and does not keep the process from ending. A call that raises must not be passed.
    """
    results: dict[str, Any] = {}

    def run(name: str, call: Callable[[], Any]) -> None:
        results[name] = call()

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {name: results.get(name, otherwise) for name in calls}
