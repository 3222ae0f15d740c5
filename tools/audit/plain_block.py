"""A Llama block as torchtitan writes it, to compare the number of kernels: PyTorch's modules and nothing else.

Differences: rotary positions are rotated with cosines and sines in fp32 instead of complex numbers, for which Inductor generates no kernel;
gradients stay at the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


class PlainBlock(nn.Module):
    """torchtitan's TransformerBlock (models/llama3/model.py) with its Attention and FeedForward.

    Args:
        config: sizes of the model, a LlamaConfig.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, width, ffn_hidden = config.hidden, config.head_dim, config.ffn_hidden
        self.heads, self.kv_heads, self.width, self.theta = config.heads, config.kv_heads, width, config.rope_theta
        self.wq = nn.Linear(hidden, config.heads * width, bias=False)
        self.wk = nn.Linear(hidden, config.kv_heads * width, bias=False)
        self.wv = nn.Linear(hidden, config.kv_heads * width, bias=False)
        self.wo = nn.Linear(config.heads * width, hidden, bias=False)
        self.w1 = nn.Linear(hidden, ffn_hidden, bias=False)
        self.w2 = nn.Linear(ffn_hidden, hidden, bias=False)
        self.w3 = nn.Linear(hidden, ffn_hidden, bias=False)
        self.attention_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(hidden, eps=config.norm_eps)

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the positions of x (batch, sequence, hidden), (sequence, width / 2) each."""
        frequencies = self.theta ** -(torch.arange(0, self.width, 2, device=x.device, dtype=torch.float32) / self.width)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device, dtype=torch.float32), frequencies)
        return angles.cos(), angles.sin()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden)."""
        x = x + self._attention(self.attention_norm(x), cos, sin)
        y = self.ffn_norm(x)
        down: Tensor = self.w2(silu(self.w1(y)) * self.w3(y))
        return x + down

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As its Attention: keys and values are repeated for the heads that share them."""
        batch, length, _ = x.shape
        q = _rotate(self.wq(x).view(batch, length, self.heads, self.width), cos, sin)
        k = _rotate(self.wk(x).view(batch, length, self.kv_heads, self.width), cos, sin)
        v = self.wv(x).view(batch, length, self.kv_heads, self.width)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        output: Tensor = self.wo(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1))
        return output


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighboring columns, (batch, sequence, heads, width), in fp32."""
    first, second = x.float().unflatten(3, (-1, 2)).unbind(4)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=4).flatten(3).to(x.dtype)
