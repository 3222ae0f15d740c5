"""The preallocated key-value cache.

The models know nothing of it: it replaces the core of every attention layer (layers/attention.py), which then stores the keys and values
of the new tokens and attends to all stored ones. What is stored is what the layer passes to its core: keys and values of the key heads
only (grouped-query attention), or one latent per token (multi-head latent attention). A layer with a sliding window stores a ring of the
last tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.attention import Core, sdpa
from pipeline.layers.mask import Mask
from pipeline.layers.mla import LatentAttention

#: Position of a slot that holds no token: later than every query, so that a causal mask excludes it.
EMPTY = 1 << 30


@dataclass(frozen=True)
class Pass:
    """The tokens that one forward pass adds to the cache.

    Attributes:
        rows: int64 (batch,), the row of the cache of each sequence.
        positions: int64 (batch, tokens), the position of each new token in its sequence.
        valid: bool (batch, tokens), False for padding, which is at the end.
        lengths: int64 (batch,), tokens of each sequence after the pass.
        longest: the largest of them.
        fresh: whether all rows were empty: the new tokens attend to each other only.
        aligned: whether a mask is unnecessary: one new token for each row, and all rows have the same length.
    """

    rows: Tensor
    positions: Tensor
    valid: Tensor
    lengths: Tensor
    longest: int
    fresh: bool
    aligned: bool
    _slots: dict[int, Tensor] = field(default_factory=dict)
    _masks: dict[int, Mask] = field(default_factory=dict)

    def slots(self, capacity: int) -> Tensor:
        """Return the slot of each new token among those of all rows, each with `capacity` slots and one for what is not kept."""
        if capacity not in self._slots:
            visible = self.valid & (self.positions >= self.lengths[:, None] - capacity)
            slot = torch.where(visible, self.positions % capacity, capacity)
            self._slots[capacity] = (self.rows[:, None] * (capacity + 1) + slot).flatten()
        return self._slots[capacity]

    def mask(self, capacity: int, given: Mask) -> Mask:
        """Return the mask of the new tokens over the slots of their rows; `given` has the score biases."""
        if capacity not in self._masks:
            last = self.lengths[:, None] - 1
            held = last - (last - torch.arange(min(capacity, self.longest), device=last.device)) % capacity
            key_positions = held.masked_fill(held < 0, EMPTY)
            self._masks[capacity] = given.replace(
                causal=not self.aligned, documents=None, positions=self.positions, key_positions=key_positions
            )
        return self._masks[capacity]


class KeyValueCache:
    """Keys and values of the tokens of several sequences, one in each row. Rows are of different lengths and independent of each other.

    The storage is allocated in the first forward pass, when the number of key heads and their widths are known.

    Args:
        blocks: transformer blocks whose self-attention stores its keys and values here.
        rows: number of sequences.
        capacity: maximum length of a sequence, tokens.
        lookahead: maximum number of tokens that are added to a row that is not empty in one pass, and that can be removed again.

    Attributes:
        lengths: int64 (rows,), tokens of each sequence, on the CPU.
    """

    def __init__(self, blocks: Iterable[nn.Module], rows: int, capacity: int, *, lookahead: int = 1) -> None:
        self.rows, self.capacity = rows, capacity
        self.lengths = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self.step: Pass | None = None
        self.layers: list[CachedAttention] = []
        for block in blocks:
            attention = block.attention
            assert isinstance(attention, nn.Module)
            latent = isinstance(attention, LatentAttention)
            window: int | None = None if latent else attention.window  # type: ignore[assignment] # a layer's own attribute
            limit = None if window is None else window + lookahead
            core = attention.core
            layer = CachedAttention(self, limit, core.core if isinstance(core, CachedAttention) else core, shared=latent)  # type: ignore[arg-type] # a Core
            attention.core = layer  # type: ignore[assignment] # a Core
            if latent:
                attention.absorb = True  # type: ignore[assignment] # an attribute, not a module
            self.layers.append(layer)

    def begin(self, rows: Tensor, counts: Tensor, device: torch.device) -> Pass:
        """Prepare a forward pass.

        Args:
            rows: int64 (batch,), the rows of the sequences, on the CPU. A pass over rows that are not empty has all rows in order.
            counts: int64 (batch,), number of new tokens of each sequence, on the CPU; further tokens of the batch are padding.
            device: of the model.
        """
        before = self.lengths[rows]
        after = before + counts
        longest = int(after.max())
        assert longest <= self.capacity, f"{longest} tokens exceed the capacity of {self.capacity}"
        self.lengths[rows] = after
        fresh = not bool(before.any())
        assert fresh or len(rows) == self.rows, "a pass over rows that are not empty has all rows"
        offsets = torch.arange(int(counts.max()), device="cpu")
        # Positions of padding may exceed the tables of the model.
        positions, valid = (before[:, None] + offsets).clamp(max=self.capacity - 1), offsets < counts[:, None]
        aligned = len(offsets) == 1 and bool((after == longest).all())
        # An idle row that never held a token attends to an empty slot: the softmax over no key would be NaN.
        lengths = after.clamp(min=1).to(device)
        self.step = Pass(rows.to(device), positions.to(device), valid.to(device), lengths, max(1, longest), fresh, aligned)
        return self.step

    def reserve(self, capacity: int) -> None:
        """Increase the capacity, if it is less."""
        if capacity > self.capacity:
            self.capacity = capacity
            for layer in self.layers:
                layer.reserve(capacity)

    def truncate(self, lengths: Tensor) -> None:
        """Remove the last tokens of the rows; lengths is int64 (rows,), at most `lookahead` less than before."""
        self.lengths = lengths.clone()

    def clear(self, rows: Tensor) -> None:
        """Empty rows, for other sequences."""
        self.lengths[rows] = 0

    def keep(self, rows: Tensor) -> None:
        """Reduce the cache to some of its rows, or reorder and repeat them (beam search); rows is int64 (n,), on the CPU."""
        self.rows, self.lengths = len(rows), self.lengths[rows]
        for layer in self.layers:
            layer.keep(rows)


def detach(blocks: Iterable[nn.Module]) -> None:
    """Give the attention layers the cores that they had before a cache."""
    for block in blocks:
        attention = block.attention
        if isinstance(attention.core, CachedAttention):  # type: ignore[union-attr] # an attention layer
            attention.core = attention.core.core  # type: ignore[union-attr] # as above
        if isinstance(attention, LatentAttention):
            attention.absorb = False


class CachedAttention:
    """The core of one attention layer: stores new keys and values, and attends to the stored ones.

    Args:
        cache: the cache of all layers.
        limit: maximum number of slots of a row that the layer needs, None for no limit.
        core: the layer's own core, for sequences that are new in the cache.
        shared: whether the values are the first dims of the keys, and not stored again.
    """

    def __init__(self, cache: KeyValueCache, limit: int | None, core: Core, *, shared: bool) -> None:
        self.cache, self.limit, self.core, self.shared = cache, limit, core, shared
        self.capacity = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.reserve(cache.capacity)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None) -> Tensor:
        """See Core; k and v are those of the new tokens."""
        step = self.cache.step
        assert step is not None
        if self.keys is None:
            self.keys = self._allocate(k)
            self.values = None if self.shared else self._allocate(v)
        slots = step.slots(self.capacity)
        _store(self.keys, slots, k)
        if self.values is not None:
            _store(self.values, slots, v)
        if step.fresh:
            return self.core(q, k, v, mask, window=window, scale=scale)
        size = min(self.capacity, step.longest)
        k = self.keys[:, :size].transpose(1, 2)
        v = k[..., : v.shape[3]] if self.values is None else self.values[:, :size].transpose(1, 2)
        return attend(q, k, v, step.mask(self.capacity, mask), window=window, scale=scale)

    def reserve(self, capacity: int) -> None:
        """See KeyValueCache. Rows that were shorter than `limit` have not wrapped around: a token keeps its slot."""
        slots, self.capacity = self.capacity, capacity if self.limit is None else min(capacity, self.limit)
        if self.capacity > slots:
            self.keys, self.values = (
                None if old is None else F.pad(old, (0, 0, 0, 0, 0, self.capacity - slots)) for old in (self.keys, self.values)
            )

    def keep(self, rows: Tensor) -> None:
        """See KeyValueCache."""
        if self.keys is not None:
            rows = rows.to(self.keys.device)
            self.keys = self.keys[rows]
            self.values = None if self.values is None else self.values[rows]

    def _allocate(self, new: Tensor) -> Tensor:
        """Return storage of (rows, capacity + 1, heads, width); zeros, since a masked NaN would still be NaN. The last slot is not read."""
        return new.new_zeros(self.cache.rows, self.capacity + 1, new.shape[1], new.shape[3])


def _store(storage: Tensor, slots: Tensor, new: Tensor) -> None:
    """Copy new keys or values, (batch, heads, tokens, width), to their slots."""
    storage.flatten(0, 1).index_copy_(0, slots, new.transpose(1, 2).flatten(0, 1))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None) -> Tensor:
    """Attention of new tokens to stored ones, as Core.

    With one query, the query heads that share a key head are computed as its queries: keys and values are then not repeated.
    """
    shared = q.shape[1] // k.shape[1]
    if shared == 1 or q.shape[2] > 1 or mask.slopes is not None or mask.bias is not None:
        return sdpa(q, k, v, mask, window=window, scale=scale)
    allowed = mask.visible(1, k.shape[2], q.device, window)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    output = F.scaled_dot_product_attention(q.unflatten(1, (-1, shared)).squeeze(3), k, v, attn_mask=allowed, scale=scale)
    return output.flatten(1, 2).unsqueeze(2)
