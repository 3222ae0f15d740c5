"""Resolution of host names: every node resolves a few names, such that every name is resolved by several nodes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial

from pipeline.preflight.bounded import bounded

#: Nodes after its own whose names a node resolves. All names on all nodes would be a million requests for 1,024 nodes.
NEIGHBORS = 2


def to_resolve(nodes: Sequence[str], index: int, suffix: str) -> list[str]:
    """The names that a node resolves: the first node's, its own and those of its successors, with cluster.host_suffix.

    Args:
        nodes: of the job, in the order of their ranks.
        index: this node's.
        suffix: cluster.host_suffix.
    """
    following = [nodes[(index + step) % len(nodes)] for step in range(NEIGHBORS + 1)]
    return list(dict.fromkeys(f"{name}{suffix}" for name in (nodes[0], *following)))


def resolve(names: Sequence[str], seconds: float) -> dict[str, str | None]:
    """Resolve names, all at once; name -> None, or what failed."""

    def failure(name: str) -> str | None:
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            return error.strerror or str(error)
        return None

    return bounded({name: partial(failure, name) for name in names}, seconds, f"no answer within {seconds:.0f} s")
