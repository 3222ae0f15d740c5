"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864), in the half-split form of Llama's Hugging Face weights."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.layers.computed_buffers import ComputedBuffers
from pipeline.layers.rope_scaling import RopeScaling, frequencies

#: (cos, sin), each (max_positions, width) or (batch, 1, sequence, width); sin includes the sign of the rotation
RotaryTables = tuple[Tensor, Tensor]


class Rotary(ComputedBuffers):
    """Cosine and sine tables of all positions, fp32 in a model of any dtype: bf16 cannot represent all integers above 256.

    Args:
        head_dim: number of dims of a head that are rotated, all of them or the first ones; dims i and i + head_dim / 2 are a pair.
        theta: base of the wavelengths 2 pi theta^(2i / head_dim).
        scaling: scaling of the frequencies, None for none.
        pairs: number of pairs that are rotated, the first ones; the frequency of the others is zero (Gemma 4). All when None.
    """

    def __init__(
        self, head_dim: int, max_positions: int, theta: float, scaling: RopeScaling | None = None, *, pairs: int | None = None
    ) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling, self.pairs = head_dim, theta, scaling or RopeScaling(), pairs
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(max_positions, head_dim, dtype=torch.float32), persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        self.reset_buffers(self.cos.device)

    def compute_buffers(self, device: torch.device) -> None:
        """See ComputedBuffers."""
        positions = torch.arange(self.cos.shape[0], dtype=torch.float32, device="cpu")
        per_position = frequencies(self.head_dim, self.theta, self.scaling)
        if self.pairs is not None:
            per_position[self.pairs :] = 0
        angles = torch.outer(positions, per_position)
        cos, sin = angles.cos() * self.scaling.attention_scaling, angles.sin() * self.scaling.attention_scaling
        self.cos = cos.repeat(1, 2).to(device)
        self.sin = torch.cat((-sin, sin), dim=1).to(device)

    def forward(self, positions: Tensor | None = None) -> RotaryTables:
        """Return the tables for `rotate`; positions are int (batch, sequence), 0, 1, ... when None."""
        if positions is None:
            return self.cos, self.sin
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate queries or keys by the angles of their positions, in fp32.

    Args:
        x: (batch, heads, sequence, head_dim).
        tables: tables of each token's position, or of at least `sequence` positions from 0 on. If they are narrower than head_dim, the
            first dims are rotated and the others are unchanged (GPT-NeoX, GLM-4.5, Qwen3-Next).

    Returns:
        Same shape and dtype as x.
    """
    cos, sin = (table[..., : x.shape[2], :] for table in tables)
    if (width := cos.shape[-1]) < x.shape[3]:
        return torch.cat((rotate(x[..., :width], tables), x[..., width:]), dim=3)
    return (x * cos + x.roll(x.shape[3] // 2, dims=3) * sin).to(x.dtype)
