"""Multi-head attention (Vaswani et al. 2017) with grouped queries (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.linear import Linear
from pipeline.layers.rotary import RotaryTables, rotate


class Attention(nn.Module):
    """Causal self-attention; `heads / kv_heads` query heads share a key and value head.

    The number of heads is read off the projections' output, so that a slice of their rows is a correct attention over fewer heads.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = Linear(hidden, heads * head_dim, bias=bias)
        self.key = Linear(hidden, kv_heads * head_dim, bias=bias)
        self.value = Linear(hidden, kv_heads * head_dim, bias=bias)
        self.output = Linear(heads * head_dim, hidden, bias=bias)

    def forward(self, x: Tensor, rotary: RotaryTables | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: (batch, sequence, hidden).
            rotary: tables of rotary positions, None where positions were added to the embedding.
            mask: bool (batch, 1, sequence, sequence), true where a query may look; None is causal.

        Returns:
            (batch, sequence, hidden).
        """
        q, k, v = (self._heads(projection(x)) for projection in (self.query, self.key, self.value))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, sequence, heads * head_dim) -> (batch, heads, sequence, head_dim)."""
        batch, sequence, _ = x.shape
        return x.view(batch, sequence, -1, self.head_dim).transpose(1, 2)


def document_mask(documents: Tensor) -> Tensor:
    """A causal mask that ends at document boundaries.

    Args:
        documents: (batch, sequence), the index of each token's document.

    Returns:
        bool (batch, 1, sequence, sequence), true where query (dim 2) may look at key (dim 3).
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril_()
