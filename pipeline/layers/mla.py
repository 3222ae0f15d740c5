"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1; equations 9 to 19)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext, Core, sdpa
from pipeline.layers.linear import Linear
from pipeline.layers.rotary import rotate

#: In the norms of the latents, whatever the others have.
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Self-attention whose keys and values all heads make from one narrow vector a token, which is all that a cache would keep.

    Positions are told by further dims of queries and keys, which alone are rotated; these dims of the keys all heads share. The weights
    have them as released: neighbours (2i, 2i + 1) turn together. The number of heads is read off the projections' output.

    Args:
        hidden: width of the residual stream.
        heads: their number.
        q_lora_rank: width of the queries' latent; None makes queries from the residual stream.
        kv_lora_rank: width of the keys' and values' latent.
        qk_nope_head_dim: width of a head's queries and keys that carries no position.
        qk_rope_head_dim: width that does.
        v_head_dim: width of a head's values.
        score_factor: of the scores, beside 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim).
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        score_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = (
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
        )
        self.scale = score_factor / (qk_nope_head_dim + qk_rope_head_dim) ** 0.5
        self.core: Core = sdpa
        self.query_down = Linear(hidden, q_lora_rank, bias=False) if q_lora_rank else None
        self.query_norm = nn.RMSNorm(q_lora_rank, eps=LATENT_EPS) if q_lora_rank else None
        self.query_up = Linear(q_lora_rank or hidden, heads * (qk_nope_head_dim + qk_rope_head_dim), bias=False)
        self.key_value_down = Linear(hidden, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.key_value_norm = nn.RMSNorm(kv_lora_rank, eps=LATENT_EPS)
        self.key_value_up = Linear(kv_lora_rank, heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.output = Linear(heads * v_head_dim, hidden, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, context: AttentionContext | None = None) -> Tensor:
        """(batch, sequence, hidden) -> the same; there is no memory but x."""
        assert memory is None, "latent attention is self-attention"
        context = context or AttentionContext()
        latent = x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))
        plain_q, turned_q = _heads(self.query_up(latent), self.qk_nope_head_dim, self.qk_rope_head_dim)
        latent, turned_k = self.key_value_down(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=2)
        plain_k, v = _heads(self.key_value_up(self.key_value_norm(latent)), self.qk_nope_head_dim, self.v_head_dim)
        turned_q, turned_k = halves(turned_q), halves(turned_k).unsqueeze(1)
        if context.rotary is not None:
            turned_q, turned_k = rotate(turned_q, context.rotary), rotate(turned_k, context.rotary)
        q = torch.cat([plain_q, turned_q], dim=3)
        k = torch.cat([plain_k, turned_k.expand(-1, plain_k.shape[1], -1, -1)], dim=3)
        mixed = self.core(q, k, v, context.mask, scale=self.scale)
        return self.output(mixed.transpose(1, 2).flatten(2))


def _heads(x: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    """(batch, sequence, heads * (first + second)) -> (batch, heads, sequence, first) and (..., second)."""
    one, other = x.unflatten(2, (-1, first + second)).transpose(1, 2).split([first, second], dim=3)
    return one, other


def halves(x: Tensor) -> Tensor:
    """(x0, x1, x2, x3, ...) -> (x0, x2, ..., x1, x3, ...) in the last dim: pairs as `rotate` has them."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
