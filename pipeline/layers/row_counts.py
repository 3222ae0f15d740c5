"""Numbers of rows of experts on the host: the only values that a MoE layer waits for."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Values:
    """What the devices of this process compute.

    Attributes:
        missing: they compute no values (a rehearsal): every expert is taken to get the same number of rows.
        filled: share of the rows of grouped products that are then taken to belong to an expert.
    """

    missing: bool = False
    filled: float = 1.0


VALUES = Values()


_READ: ContextVar[ReadCounts | None] = ContextVar("_READ", default=None)


class ReadCounts:
    """A context that remembers the numbers of rows that are read in it, or that gives them again, as a recomputation needs them.

    Args:
        sizes: the numbers, in order.
        again: whether to give them again; the context may then be entered several times.
    """

    def __init__(self, sizes: list[list[int]], *, again: bool) -> None:
        self._sizes, self._again, self._next = sizes, again, 0

    def __enter__(self) -> None:
        self._next = 0
        self._token = _READ.set(self)

    def __exit__(self, *_: object) -> None:
        _READ.reset(self._token)

    def read(self, compute: Callable[[], list[int]]) -> list[int]:
        """The numbers that `compute` reads, or has read in the forward pass."""
        if not self._again:
            self._sizes.append(compute())
            return self._sizes[-1]
        self._next += 1
        return self._sizes[self._next - 1]


def counts_on_host(counts: Tensor, rows: int) -> list[int]:
    """Read numbers of rows, which synchronizes with the device unless a recomputation knows them from the forward pass.

    They are equal numbers where there are no values, as in the planner.

    Args:
        counts: int64 (n,).
        rows: their sum, if every row belongs to an expert.
    """
    memory = _READ.get()
    on_host = [] if counts.is_meta else counts.tolist() if memory is None else memory.read(counts.tolist)
    return [rows // len(counts)] * len(counts) if counts.is_meta or VALUES.missing else on_host
