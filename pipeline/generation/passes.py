"""The tokens of a forward pass with a cache, in groups of sequences whose attention is computed together, and the masks of each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.layers.mask import Mask

#: Position of a slot that holds no token: later than every query, so that a causal mask excludes it.
EMPTY = 1 << 30
#: Slots that attention may compute for nothing beyond the end of a sequence, before the sequence gets a group of its own.
PADDING = 256
#: int64 (batch, queries), (batch, keys) positions -> (batch, heads, queries, keys) biases of the scores.
Bias = Callable[[Tensor, Tensor], Tensor]


@dataclass
class SequenceGroup:
    """Sequences whose attention is computed together; all have the same number of new tokens.

    Attributes:
        members: the sequences, numbers within the pass.
        rows: int64 (n,), their rows of the cache, on the CPU.
        first, last: their tokens are first:last of the pass.
        positions: int64 (n, tokens), of the new tokens.
        lengths: int64 (n,), tokens of each sequence after the pass; on the device, as positions.
        before, longest: the largest number of tokens before and after the pass.
        fresh: whether all rows were empty and have the same length: the new tokens attend to each other only.
        aligned: whether a mask is unnecessary: one new token for each row, and all rows have the same length.
    """

    members: list[int]
    rows: Tensor
    first: int
    last: int
    positions: Tensor
    lengths: Tensor
    before: int
    longest: int
    fresh: bool
    aligned: bool
    _masks: dict[tuple[int | None, bool], Mask] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """New tokens of each sequence."""
        return self.positions.shape[1]

    def split(self, x: Tensor) -> Tensor:
        """Return the group's part of the tokens of a pass: (1, heads, all tokens, width) -> (n, heads, tokens, width)."""
        part = x[:, :, self.first : self.last]
        return part.transpose(0, 2) if self.count == 1 else part[0].unflatten(1, (len(self.members), self.count)).transpose(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`: (n, heads, tokens, width) -> (1, heads, the group's tokens, width)."""
        return x.transpose(0, 2) if self.count == 1 else x.transpose(0, 1).flatten(1, 2)[None]

    def fresh_mask(self, given: Mask, bias: Bias | None) -> Mask:
        """Return the mask of new tokens that attend to each other."""
        if (None, True) not in self._masks:
            places = torch.arange(self.count, device=self.positions.device)[None]
            self._masks[None, True] = given.replace(positions=None, bias=None if bias is None else bias(places, places))
        return self._masks[None, True]

    def mask(self, limit: int | None, given: Mask, bias: Bias | None, *, joined: bool) -> Mask:
        """Return the mask of the new tokens over the stored ones.

        Args:
            limit: as in PageTable.
            given: has the slopes.
            joined: whether the keys are the stored ones before the pass, and the new ones after them.
        """
        if (limit, joined) not in self._masks and self.aligned and limit is None and given.slopes is None and bias is None:
            self._masks[limit, joined] = given.replace(causal=False, documents=None, positions=None)
        if (limit, joined) not in self._masks:
            lengths = self.lengths - self.count if joined else self.lengths
            longest = self.before if joined else self.longest
            last = lengths[:, None] - 1
            slots = torch.arange(longest if limit is None else min(limit, longest), device=last.device)
            held = slots.expand(len(last), -1) if limit is None else last - (last - slots) % limit
            keys = held.masked_fill((held < 0) | (held > last), EMPTY)
            keys = torch.cat([keys, self.positions], dim=1) if joined else keys
            biases = None if bias is None else bias(self.positions, keys)
            self._masks[limit, joined] = given.replace(
                causal=not self.aligned, documents=None, positions=self.positions, key_positions=keys, bias=biases
            )
        return self._masks[limit, joined]


@dataclass
class Pass:
    """The tokens that one forward pass adds to the cache.

    Attributes:
        groups: the sequences with new tokens. Tokens are in the order of the groups.
        rows: int64 (tokens,), the row of each token, on the CPU.
        positions: int64 (1, tokens), the position of each token in its sequence, on the device.
        kept: bool (tokens,) for each limit, whether a token is stored; None if all are.
        slots: int64 (stored tokens,) for each limit, on the device.
        pages: int64 (n, pages) for each limit and group, on the device.
    """

    groups: list[SequenceGroup]
    rows: Tensor
    positions: Tensor
    kept: dict[int | None, Tensor | None] = field(default_factory=dict)
    slots: dict[int | None, Tensor] = field(default_factory=dict)
    pages: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    @property
    def order(self) -> list[int]:
        """The sequences of the pass, in the order of their tokens."""
        return [member for group in self.groups for member in group.members]


def grouped(before: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """The sequences of each group: new prompts of one length; others with as many new tokens, and similar lengths `before`."""
    kinds: dict[tuple[bool, int], list[int]] = {}
    for member, (length, count) in enumerate(zip(before, counts, strict=True)):
        kinds.setdefault((length == 0, count), []).append(member)
    groups = []
    for (fresh, _), members in kinds.items():
        lengths = [before[member] for member in members]
        if fresh or max(lengths) - min(lengths) <= PADDING:
            groups.append(members)
            continue
        group: list[int] = []
        for member in sorted(members, key=lambda member: -before[member]):
            if group and before[group[0]] - before[member] > max(PADDING, before[group[0]] // 4):
                groups.append(group)
                group = []
            group.append(member)
        groups.append(group)
    return groups
