"""The paged key-value cache.

The models know nothing of it: it replaces the core of every attention layer (layers/attention.py), which then stores the keys and values
of the new tokens and attends to all stored ones. What is stored is what the layer passes to its core: keys and values of the key heads
only (grouped-query attention), or one latent per token (multi-head latent attention). A layer with a sliding window stores a ring of the
last tokens. A layer with a recurrent state stores it for each sequence instead (recurrent_cache.py).

The tokens of a forward pass are those of all its sequences, one after the other, as one sequence: prompts and parts of prompts beside
single tokens, without padding. Only attention is computed in groups of sequences with the same number of new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.generation.pages import PAGE, PageTable
from pipeline.generation.passes import Bias, Pass, SequenceGroup, grouped
from pipeline.generation.recurrent_cache import CachedMixing
from pipeline.layers.attention import Core, CoreOptions, sdpa
from pipeline.layers.mask import Mask
from pipeline.layers.mla import LatentAttention
from pipeline.layers.recurrent import RecurrentLayer, mix


class KeyValueCache:
    """Keys and values of the tokens of several sequences, one in each row. Rows are of different lengths and independent of each other.

    Args:
        blocks: transformer blocks whose self-attention stores its keys and values here.
        rows: number of sequences. A row without tokens has no storage.
        capacity: maximum length of a sequence, tokens.
        lookahead: maximum number of tokens that can be removed again.

    Attributes:
        lengths: int64 (rows,), tokens of each sequence, on the CPU.
    """

    def __init__(self, blocks: Iterable[nn.Module], rows: int, capacity: int, *, lookahead: int = 1, bias: Bias | None = None) -> None:
        self.rows, self.capacity, self.lookahead, self.bias = rows, capacity, lookahead, bias
        self.lengths = torch.zeros(rows, dtype=torch.int64, device="cpu")
        self.step: Pass | None = None
        self.layers: list[CachedAttention] = []
        self.recurrent: list[CachedMixing] = []
        self.tables: dict[int | None, PageTable] = {}
        sources: dict[int | None, CachedAttention] = {}
        for block in blocks:
            attention = block.attention
            if attention is None:
                continue
            assert isinstance(attention, nn.Module)
            if isinstance(attention, RecurrentLayer):
                self.recurrent.append(CachedMixing(self, attention))
                continue
            latent = isinstance(attention, LatentAttention)
            window: int | None = None if latent else attention.window  # type: ignore[assignment] # a layer's own attribute
            limit = None if window is None or window + lookahead >= capacity else window + lookahead
            core = attention.core
            layer = CachedAttention(self, limit, core.core if isinstance(core, CachedAttention) else core, attention)  # type: ignore[arg-type] # a Core
            attention.core = layer  # type: ignore[assignment] # a Core
            if latent:
                attention.absorb = True  # type: ignore[assignment] # an attribute, not a module
            if getattr(attention, "reuses_keys", False):
                layer.source = sources[window]
                continue
            sources[window] = layer
            self.layers.append(layer)
            self.tables.setdefault(limit, PageTable(rows, limit)).pools.append(layer)

    @property
    def allocated(self) -> int:
        """Bytes of the storage of all layers."""
        pools = sum(stored.nbytes for layer in self.layers for stored in (layer.keys, layer.values) if stored is not None)
        return pools + sum(layer.allocated for layer in self.recurrent)

    def bytes_of(self, length: int) -> int:
        """Return the bytes that the pages and states of a sequence of `length` tokens have."""
        pages = sum(self.tables[layer.limit].pages(length) * PAGE * layer.token_bytes for layer in self.layers)
        return pages + sum(layer.row_bytes for layer in self.recurrent if length)

    def begin(self, rows: Sequence[int], counts: Sequence[int], device: torch.device) -> Pass:
        """Prepare a forward pass, which adds `counts` tokens, at least 1, to the sequences of `rows`."""
        lengths = self.lengths.tolist()
        before = [lengths[row] for row in rows]
        after = [length + count for length, count in zip(before, counts, strict=True)]
        assert max(after) <= self.capacity, f"{max(after)} tokens exceed the capacity of {self.capacity}"
        for row, length in zip(rows, after, strict=True):
            lengths[row] = length
        self.lengths.copy_(torch.tensor(lengths, device="cpu"))
        for table in self.tables.values():
            table.fit(lengths)
        groups, first, token_rows, positions = [], 0, [], []
        for members in grouped(before, counts):
            count = counts[members[0]]
            starts = [before[member] for member in members]
            places = torch.tensor(starts, device="cpu")[:, None]
            places = places if count == 1 else places + torch.arange(count, device="cpu")
            of_group = torch.tensor([rows[member] for member in members], device="cpu")
            token_rows.append(of_group if count == 1 else of_group.repeat_interleave(count))
            positions.append(places.flatten())
            shortest, longest = min(after[member] for member in members), max(after[member] for member in members)
            fresh, aligned = not any(starts), count == 1 and shortest == longest
            on_device = places.to(device)
            ends = on_device[:, -1] + 1
            last = first + len(members) * count
            groups.append(SequenceGroup(members, of_group, first, last, on_device, ends, longest - count, longest, fresh, aligned))
            first = last
        flat = torch.cat(positions)
        self.step = Pass(groups, torch.cat(token_rows), flat.to(device)[None])
        for limit, table in self.tables.items():
            kept = None if limit is None else flat >= self.lengths[self.step.rows] - limit
            kept = None if kept is None or bool(kept.all()) else kept
            stored = (self.step.rows, flat) if kept is None else (self.step.rows[kept], flat[kept])
            self.step.kept[limit] = None if kept is None else kept.to(device)
            self.step.slots[limit] = table.slots(*stored).to(device)
            for index, group in enumerate(groups):
                if not group.fresh:
                    self.step.pages[limit, index] = table.of(group.rows, group.longest, device)
        return self.step

    def truncate(self, lengths: Tensor) -> None:
        """Remove the last tokens of the rows; lengths is int64 (rows,), at most `lookahead` less than before.

        With a recurrent state, they are tokens of the last pass, in which the row had at most `lookahead`.
        """
        for layer in self.recurrent:
            layer.remove(self.lengths - lengths)
        self.lengths = lengths.clone()

    def clear(self, rows: Sequence[int]) -> None:
        """Empty rows, for other sequences. Their pages are returned in the next pass."""
        self.lengths[list(rows)] = 0

    @torch.inference_mode()
    def keep(self, rows: Tensor) -> None:
        """Reduce the cache to some of its rows, or reorder and repeat them (beam search); rows is int64 (n,), on the CPU."""
        self.rows, self.lengths = len(rows), self.lengths[rows]
        for table in self.tables.values():
            table.keep(rows.tolist())
        for layer in self.recurrent:
            layer.keep(rows)


def detach(blocks: Iterable[nn.Module]) -> None:
    """Give the attention layers the cores that they had before a cache."""
    for block in blocks:
        attention = block.attention
        if isinstance(attention, RecurrentLayer):
            attention.mix = mix
            continue
        if attention is not None and isinstance(attention.core, CachedAttention):  # type: ignore[union-attr] # an attention layer
            attention.core = attention.core.core  # type: ignore[union-attr] # as above
        if isinstance(attention, LatentAttention):
            attention.absorb = False


class CachedAttention:
    """The core of one attention layer: stores new keys and values, and attends to the stored ones.

    Args:
        limit: as in PageTable.
        core: the layer's own core, for sequences that are new in the cache.
        attention: the layer. Of multi-head latent attention, the values are the first dims of the keys, and not stored again.

    Attributes:
        keys, values: (pages, PAGE, heads, width), None before the first pass.
        token_bytes: size of a slot.
        source: the layer whose keys and values this one attends to (layers/shared_keys.py); itself for most layers.
        joined: number of a group -> its keys and values before the present pass, where the pass overwrites them.
    """

    def __init__(self, cache: KeyValueCache, limit: int | None, core: Core, attention: nn.Module) -> None:
        self.cache, self.limit, self.core = cache, limit, core
        self.shared = isinstance(attention, LatentAttention)
        # Weights of this tensor rank: a latent is the same on all of them.
        key = attention.key_value_down if self.shared else attention.key
        stored = [] if key is None else [key] if self.shared else [key, key if attention.value is None else attention.value]
        self.token_bytes = sum(layer.weight.shape[0] * layer.weight.element_size() for layer in stored)  # type: ignore[union-attr,operator,index,misc] # linear layers
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.source = self
        self.joined: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Unpack[CoreOptions]) -> Tensor:
        """See Core; k and v are those of the new tokens, (1, kv_heads, tokens, width)."""
        step = self.cache.step
        assert step is not None
        if self.source is self:
            self._store_all(step, k, v)
        joined = self.source.joined
        outputs = []
        for index, group in enumerate(step.groups):
            new_q, new_k, new_v = group.split(q), group.split(k), group.split(v)
            if group.fresh:
                core = self.core if group.count > 1 else sdpa  # cuDNN has no kernel for a single key
                output = core(new_q, new_k, new_v, group.fresh_mask(mask, self.cache.bias), **options)
            else:
                if index in joined:
                    keys, values = (torch.cat(pair, dim=2) for pair in zip(joined[index], (new_k, new_v), strict=True))
                else:
                    keys, values = self.source._stored(index, group.longest)
                over = group.mask(self.limit, mask, self.cache.bias, joined=index in joined)
                output = attend(new_q, keys, values[..., : v.shape[3]], over, **options)
            outputs.append(group.join(output))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _store_all(self, step: Pass, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the new tokens."""
        if self.keys is None:
            pages = self.cache.tables[self.limit].size
            self.keys = k.new_zeros(pages, PAGE, k.shape[1], k.shape[3])
            self.values = None if self.shared else v.new_zeros(pages, PAGE, v.shape[1], v.shape[3])
        # New tokens overwrite the oldest ones of a ring: if there are many, the first of them still attend to those.
        self.joined = {index: self._stored(index, group.before) for index, group in enumerate(step.groups) if self._joins(group)}
        self._store(step, self.keys, k)
        if self.values is not None:
            self._store(step, self.values, v)

    def resize(self, pages: int, sources: Tensor, targets: Tensor) -> None:
        """Copy pages `sources` to `targets`, both int64 (n,), within the first `pages` pages, which then are the storage."""
        if self.keys is not None:
            self.copy(sources, targets)
            self.keys = _resized(self.keys, pages)
            self.values = None if self.values is None else _resized(self.values, pages)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages."""
        for stored in (self.keys, self.values):
            if stored is not None and len(sources):
                stored[targets.to(stored.device)] = stored[sources.to(stored.device)]

    def _joins(self, group: SequenceGroup) -> bool:
        """Whether a group attends to stored and new keys side by side."""
        return self.limit is not None and not group.fresh and group.count > self.cache.lookahead

    def _stored(self, group: int, longest: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a group, (n, heads, slots, width); the slots beyond a sequence hold anything."""
        assert self.cache.step is not None
        assert self.keys is not None
        pages = self.cache.step.pages[self.limit, group]
        size = longest if self.limit is None else min(longest, self.limit)

        def gathered(stored: Tensor) -> Tensor:
            return stored.index_select(0, pages.flatten()).view(len(pages), -1, *stored.shape[2:])[:, :size].transpose(1, 2)

        keys = gathered(self.keys)
        return keys, keys if self.values is None else gathered(self.values)

    def _store(self, step: Pass, stored: Tensor, new: Tensor) -> None:
        """Copy new keys or values, (1, heads, tokens, width), to their slots."""
        kept = step.kept[self.limit]
        tokens = new[0].transpose(0, 1)
        stored.flatten(0, 1).index_copy_(0, step.slots[self.limit], tokens if kept is None else tokens[kept])


def _resized(stored: Tensor, pages: int) -> Tensor:
    """Return a pool with another number of pages; zeros, since a masked NaN would still be NaN."""
    if pages <= len(stored):
        return stored[:pages].clone()
    larger = stored.new_empty(pages, *stored.shape[1:])
    larger[: len(stored)] = stored
    larger[len(stored) :] = 0
    return larger


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Unpack[CoreOptions]) -> Tensor:
    """Attention of new tokens to stored ones, as Core.

    With one query, the query heads that share a key head are computed as its queries: keys and values are then not repeated.
    """
    shared, changed = q.shape[1] // k.shape[1], mask.slopes is not None or mask.bias is not None or mask.softcap is not None
    if shared == 1 or q.shape[2] > 1 or changed or options.get("sinks") is not None:
        return sdpa(q, k, v, mask, **options)
    allowed = mask.visible(1, k.shape[2], q.device, options.get("window"))
    scale = q.shape[3] ** -0.5 if (given := options.get("scale")) is None else given
    output = F.scaled_dot_product_attention(q.unflatten(1, (-1, shared)).squeeze(3), k, v, attn_mask=allowed, scale=scale)
    return output.flatten(1, 2).unsqueeze(2)
