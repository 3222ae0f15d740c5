"""Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509): for attention, ranks swap tokens for heads and back, all-to-all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from pipeline.layers.attention import Core
from pipeline.layers.mask import Mask
from pipeline.parallel import collectives


@dataclass(frozen=True)
class UlyssesCore:
    """An attention core that runs another one on all tokens of some heads. Rank r holds the r-th part of each sequence."""

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
    ) -> torch.Tensor:
        """See Core (layers/attention.py); the mask's documents are those of this rank's tokens, its slopes those of all heads."""
        whole: Mask = mask.cached("of all tokens", lambda: self._of_all_tokens(mask))
        q, k, v = (collectives.heads_for_tokens(x, self.group) for x in (q, k, v))
        return collectives.tokens_for_heads(self.inner(q, k, v, whole, window=window, scale=scale), self.group)

    def _of_all_tokens(self, mask: Mask) -> Mask:
        """Tokens in order, so that positions count from 0; the slopes of the heads that are swapped in."""
        assert mask.bias is None, "a bias for each query and key is not cut along the sequence"
        assert mask.key_documents is None, "swapping is for attention to oneself"
        documents = None if mask.documents is None else torch.cat(collectives.gather(mask.documents, self.group), dim=1)
        slopes = None if mask.slopes is None else mask.slopes.chunk(self.group.size())[self.group.rank()]
        return mask.replace(documents=documents, positions=None, slopes=slopes)
