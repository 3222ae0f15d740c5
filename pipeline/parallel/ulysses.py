"""Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509): all-to-all from tokens to heads before attention, and back after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from pipeline.layers import attention_kernel
from pipeline.layers.attention import Core
from pipeline.layers.mask import Mask
from pipeline.parallel import collectives


@dataclass(frozen=True)
class UlyssesCore:
    """An attention core that runs another core on all tokens of some heads. Rank r holds the r-th contiguous shard of each sequence."""

    inner: Core
    group: ProcessGroup

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Mask,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See Core (layers/attention.py); the mask has the documents of the local tokens, and slopes and sinks are those of all heads."""
        full_mask = self._full_mask(mask)
        q, k, v = (collectives.scatter_heads_gather_sequence(x, self.group) for x in (q, k, v))
        # Of the other heads the gradient is zero here: the ranks add theirs, as for every weight.
        own = None if sinks is None else sinks.chunk(self.group.size())[self.group.rank()]
        output = self.inner(q, k, v, full_mask, window=window, scale=scale, sinks=own)
        return collectives.scatter_sequence_gather_heads(output, self.group)

    def prepare(
        self, mask: Mask, window: int | None, shape: tuple[int, int, int] | None, device: torch.device, *, sinks: bool = False
    ) -> None:
        """Gather the documents of all tokens and compute their mask; see prepare (layers/attention_kernel.py)."""
        ranks = self.group.size()
        full = None if shape is None else (shape[0], ranks * shape[1], ranks * shape[2])
        attention_kernel.prepare(self.inner, self._full_mask(mask), window, full, device, sinks=sinks)

    def _full_mask(self, mask: Mask) -> Mask:
        """The mask of full sequences, computed once."""
        full: Mask = mask.cached("of all tokens", lambda: self._compute_full_mask(mask))
        return full

    def _compute_full_mask(self, mask: Mask) -> Mask:
        """The mask of full sequences, with positions that start at 0, and the slopes of the local heads."""
        assert mask.bias is None, "ulysses does not shard a bias per query and key"
        assert mask.key_documents is None, "ulysses supports self-attention only"
        documents = None if mask.documents is None else torch.cat(collectives.all_gather(mask.documents, self.group), dim=1)
        slopes = None if mask.slopes is None else mask.slopes.chunk(self.group.size())[self.group.rank()]
        return mask.replace(documents=documents, positions=None, slopes=slopes)
