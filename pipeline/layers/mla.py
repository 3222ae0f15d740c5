"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1; equations 9 to 19)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext, Core, sdpa
from pipeline.layers.linear import Linear
from pipeline.layers.mask import Mask
from pipeline.layers.rotary import rotate

#: eps of the RMSNorms of the latents, as in the reference code; it does not depend on the configuration.
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Self-attention that projects the keys and values of all heads up from one low-rank latent per token.

    A KV cache needs to store only this latent and the rotated key dims: with `absorb`, the attention core gets them as the key of a single
    head, and the latent as its value.

    Queries and keys have qk_nope_head_dim dims without positions and qk_rope_head_dim dims that are rotated; all heads share the rotated
    dims of the keys. The released weights rotate interleaved pairs (2i, 2i + 1). Without rotary tables in the context, no dims are rotated
    (Kimi Linear). The number of heads is taken from the shape of the projections' output.

    Args:
        hidden: width of the residual stream.
        heads: number of heads.
        q_lora_rank: width of the query latent; None projects queries directly from the residual stream.
        kv_lora_rank: width of the latent of keys and values.
        qk_nope_head_dim: dims of a head's queries and keys without positions.
        qk_rope_head_dim: dims of a head's queries and keys that are rotated.
        v_head_dim: dims of a head's values.
        score_factor: scales the scores in addition to 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim).

    Attributes:
        absorb: multiply the projections that expand the latent into queries and outputs (section 2.1.2) instead of expanding the latent
            of every key. The result is the same; it needs fewer operations if there are many more keys than queries.
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
        self.absorb = False
        self.query_down = Linear(hidden, q_lora_rank, bias=False) if q_lora_rank else None
        self.query_norm = nn.RMSNorm(q_lora_rank, eps=LATENT_EPS) if q_lora_rank else None
        self.query_up = Linear(q_lora_rank or hidden, heads * (qk_nope_head_dim + qk_rope_head_dim), bias=False)
        self.key_value_down = Linear(hidden, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.key_value_norm = nn.RMSNorm(kv_lora_rank, eps=LATENT_EPS)
        self.key_value_up = Linear(kv_lora_rank, heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.output = Linear(heads * v_head_dim, hidden, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, context: AttentionContext | None = None) -> Tensor:
        """Compute self-attention: (batch, sequence, hidden) -> (batch, sequence, hidden); memory must be None."""
        assert memory is None, "multi-head latent attention supports self-attention only"
        context = context or AttentionContext()
        latent = x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))
        q_nope, q_rope = _split_heads(self.query_up(latent), self.qk_nope_head_dim, self.qk_rope_head_dim)
        latent, k_rope = self.key_value_down(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=2)
        latent = self.key_value_norm(latent)
        k_rope = k_rope.unsqueeze(1)
        if context.rotary is not None:
            q_rope, k_rope = (rotate(deinterleave(x), context.rotary) for x in (q_rope, k_rope))
        attend = self._attend_to_latents if self.absorb else self._attend
        return self.output(attend(q_nope, q_rope, latent, k_rope, context.mask).transpose(1, 2).flatten(2))

    def _attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Mask) -> Tensor:
        """Expand the latents to keys and values of all heads, and attend to these.

        Args:
            q_nope: (batch, heads, sequence, qk_nope_head_dim).
            q_rope: (batch, heads, sequence, qk_rope_head_dim).
            latent: (batch, sequence, kv_lora_rank).
            k_rope: (batch, 1, sequence, qk_rope_head_dim).
            mask: the attention mask.

        Returns:
            (batch, heads, sequence, v_head_dim).
        """
        k_nope, v = _split_heads(self.key_value_up(latent), self.qk_nope_head_dim, self.v_head_dim)
        q = torch.cat([q_nope, q_rope], dim=3)
        k = torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)], dim=3)
        return self.core(q, k, v, mask, scale=self.scale)

    def _attend_to_latents(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Mask) -> Tensor:
        """Compute `_attend` with queries and outputs in the space of the latents."""
        up = self.key_value_up.weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        up_keys, up_values = up.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        q = torch.cat([torch.einsum("bhsn,hnr->bhsr", q_nope, up_keys), q_rope], dim=3)
        k = torch.cat([latent.unsqueeze(1), k_rope], dim=3)
        outputs = self.core(q, k, k[..., : self.kv_lora_rank], mask, scale=self.scale)
        return torch.einsum("bhsr,hvr->bhsv", outputs, up_values)


def _split_heads(x: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    """(batch, sequence, heads * (first + second)) -> (batch, heads, sequence, first) and (..., second)."""
    head, tail = x.unflatten(2, (-1, first + second)).transpose(1, 2).split([first, second], dim=3)
    return head, tail


def deinterleave(x: Tensor) -> Tensor:
    """Reorder interleaved pairs of the last dim as `rotate` expects them: (x0, x1, x2, x3, ...) -> (x0, x2, ..., x1, x3, ...)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
