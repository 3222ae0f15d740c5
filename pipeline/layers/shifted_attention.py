"""Shifted sparse attention (LongLoRA; Chen et al. 2023, https://arxiv.org/abs/2309.12307, section 3.2): training with attention in groups.

Tokens attend within their group of consecutive tokens. For the second half of the heads, the groups are shifted by half their size, so that
information passes between groups. In the paper's code the shift is cyclic, and the first tokens attend to the last ones of the sequence;
here the two half groups at the ends are groups of their own, so that attention stays causal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.layers.attention import Core, repeat_kv
from pipeline.layers.mask import Mask


class ShiftedSparseAttention:
    """A core that calls another one for each group; full attention while it is disabled. See Core for the interface.

    Args:
        core: attention within a group.
        group: tokens of a group, an even number that divides the sequence length. Shorter sequences have full attention.
        plain_heads: number of the query heads whose groups are not shifted, the first ones.
    """

    def __init__(self, core: Core, group: int, plain_heads: int) -> None:
        self.core, self.group, self.plain_heads = core, group, plain_heads
        self.enabled = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See Core; queries and keys are the same tokens."""
        heads, tokens, group = q.shape[1], q.shape[2], self.group
        if not self.enabled or tokens <= group:
            return self.core(q, k, v, mask, window=window, scale=scale, sinks=sinks)
        assert tokens % group == 0, "checked by the configuration"
        assert mask.bias is None, "decoders have none"
        shared = heads // k.shape[1]
        if self.plain_heads % shared:  # a key head has query heads of both kinds
            (k, v), shared = repeat_kv(q, k, v), 1
        whole, half = [(0, tokens, group)], group // 2
        shifted = [(0, half, half), (half, tokens - half, group), (tokens - half, tokens, half)]
        outputs = []
        for first, last, ranges in ((0, self.plain_heads, whole), (self.plain_heads, heads, shifted)):
            if first == last:
                continue
            keys = slice(first // shared, last // shared)
            sliced = None if sinks is None else sinks[first:last]
            parts = [
                self._attend(q[:, first:last], k[:, keys], v[:, keys], mask, (first, last), span, window=window, scale=scale, sinks=sliced)
                for span in ranges
            ]
            outputs.append(torch.cat(parts, dim=2))
        return torch.cat(outputs, dim=1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, heads: tuple[int, int], span: tuple[int, int, int], **options: Any
    ) -> Tensor:
        """Attention of the tokens from start to stop in groups of a size (`span`), which become sequences of the batch."""
        start, stop, size = span
        batch = q.shape[0]
        q, k, v = (
            x[:, :, start:stop].unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1) for x in (q, k, v)
        )  # (batch * groups, heads, size, width)
        output = self.core(q, k, v, mask.cached(("groups", heads, span), lambda: _group_mask(mask, heads, span)), **options)
        return output.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)


def _group_mask(mask: Mask, heads: tuple[int, int], span: tuple[int, int, int]) -> Mask:
    """Return the mask of groups that are sequences of the batch, for some of the heads."""
    start, stop, size = span

    def grouped(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, start:stop].reshape(-1, size)

    slopes = None if mask.slopes is None else mask.slopes[slice(*heads)]
    return mask.replace(documents=grouped(mask.documents), positions=grouped(mask.positions), slopes=slopes)


@contextmanager
def full_attention(model: nn.Module) -> Iterator[None]:
    """Disable shifted sparse attention in a model: its validation, as its later use, has full attention."""
    cores = [core for module in model.modules() if isinstance(core := getattr(module, "core", None), ShiftedSparseAttention)]
    for core in cores:
        core.enabled = False
    try:
        yield
    finally:
        for core in cores:
            core.enabled = True
