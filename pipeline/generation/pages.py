"""Pages of the key-value cache: which slots a sequence has (PagedAttention, Kwon et al. 2023, https://arxiv.org/abs/2309.06180).

The storage of a layer is a pool of pages of PAGE slots. A sequence gets pages as it grows, and returns them when it ends. The pool grows
and shrinks with the pages in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pipeline.generation.cache import CachedAttention

#: Slots of a page. A sequence leaves at most PAGE - 1 slots unused.
PAGE = 8
#: Free pages that a pool keeps, as a share of the pages in use: 1 / SLACK. A pool that is resized is copied.
SLACK = 16


class PageTable:
    """The pages of some sequences, for all layers with the same limit.

    `limit` is the maximum number of slots of a sequence, a ring of its last tokens, None for no limit; `size` the pages of the pools.
    """

    def __init__(self, rows: int, limit: int | None) -> None:
        self.limit, self.size = limit, 0
        self.pools: list[CachedAttention] = []
        self._counts = [0] * rows
        self._table = torch.zeros(rows, 0, dtype=torch.int64, device="cpu")
        self._free: list[int] = []
        self._on_device: Tensor | None = None

    def pages(self, length: int) -> int:
        """Return the number of pages of a sequence of `length` tokens."""
        return -(-(length if self.limit is None else min(length, self.limit)) // PAGE)

    def fit(self, lengths: Sequence[int]) -> None:
        """Give each row the pages of a length, and take back others."""
        wanted = [self.pages(length) for length in lengths]
        if wanted == self._counts:
            return
        for row, count in enumerate(wanted):
            if count < self._counts[row]:
                self._free += self._table[row, count : self._counts[row]].tolist()
                self._counts[row] = count
        self._resize(sum(wanted))
        for row, count in enumerate(wanted):
            if count > self._counts[row]:
                self._append(row, count)
        self._on_device = None

    def keep(self, rows: Sequence[int]) -> None:
        """Reduce the table to some rows, or reorder and repeat them; the pages of a row that is repeated are copied."""
        for row in set(range(len(self._counts))) - set(rows):
            self._free += self._table[row, : self._counts[row]].tolist()
        counts = [self._counts[row] for row in rows]
        first = [row not in rows[:index] for index, row in enumerate(rows)]
        table = self._table[list(rows)]
        self._table = table[[index for index, owns in enumerate(first) if owns]]
        self._counts = [count for count, owns in zip(counts, first, strict=True) if owns]
        owner = {row: index for index, row in enumerate(row for row, owns in zip(rows, first, strict=True) if owns)}
        self._resize(sum(counts))
        self._table, self._counts = self._table[[owner[row] for row in rows]], counts
        sources = []
        targets: list[int] = []
        for index, (count, owns) in enumerate(zip(counts, first, strict=True)):
            if not owns:
                sources += self._table[index, :count].tolist()
                taken = [self._free.pop() for _ in range(count)]
                self._table[index, :count] = torch.tensor(taken, dtype=torch.int64)
                targets += taken
        if sources:
            for pool in self.pools:
                pool.copy(torch.tensor(sources, device="cpu"), torch.tensor(targets, device="cpu"))
        self._on_device = None

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the slots in the pools of tokens: int64 (n,), (n,) -> (n,), all on the CPU."""
        slot = positions if self.limit is None else positions % self.limit
        return self._table[rows, slot // PAGE] * PAGE + slot % PAGE

    def of(self, rows: Tensor, longest: int, device: torch.device) -> Tensor:
        """Return the pages of rows, int64 (n, pages of the longest) on the device; pages that a row does not have are any."""
        if self._on_device is None:
            self._on_device = self._table.to(device)
        return self._on_device[rows.to(device), : self.pages(longest)]

    def _append(self, row: int, count: int) -> None:
        """Give a row further pages."""
        if count > self._table.shape[1]:
            wider = max(count, self._table.shape[1] * 5 // 4) - self._table.shape[1]
            self._table = torch.nn.functional.pad(self._table, (0, wider))
        taken = [self._free.pop() for _ in range(count - self._counts[row])]
        self._table[row, self._counts[row] : count] = torch.tensor(taken, dtype=torch.int64)
        self._counts[row] = count

    def _resize(self, used: int) -> None:
        """Change the size of the pools, if they are too small for `used` pages or have too many free ones."""
        size = used + used // SLACK
        if used <= self.size <= size + 1:
            return
        # Pages beyond the end move to free ones before it. More pages may be free than the rows will use.
        held = [page for row, count in enumerate(self._counts) for page in self._table[row, :count].tolist()]
        size = max(size, len(held))
        moving = sorted(page for page in held if page >= size)
        occupied = set(held)
        free = [page for page in range(size - 1, -1, -1) if page not in occupied]
        moved = {page: free.pop() for page in moving}
        if moved:
            for row, count in enumerate(self._counts):
                self._table[row, :count] = torch.tensor([moved.get(page, page) for page in self._table[row, :count].tolist()])
        sources, targets = (torch.tensor(list(pages), dtype=torch.int64, device="cpu") for pages in (moved.keys(), moved.values()))
        for pool in self.pools:
            pool.resize(size, sources, targets)
        # A page that is not held is outside of the table's counts: its number is read by `of` and must exist.
        self._table.clamp_(max=max(size - 1, 0))
        self._free, self.size, self._on_device = free, size, None
