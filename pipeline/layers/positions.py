"""Absolute position embeddings, learned or sinusoidal, added to token embeddings.

Other encodings of positions: rotary in layers/rotary.py; ALiBi slopes and relative position biases in layers/position_bias.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.layers.computed_buffers import ComputedBuffers


def add_position_embeddings(
    hidden: Tensor, positions: Tensor | None, *, learned: nn.Embedding | None = None, offset: int = 0, sinusoidal: nn.Module | None = None
) -> Tensor:
    """Add the embedding of each token's position to its hidden state.

    Args:
        hidden: (batch, sequence, hidden), the token embeddings.
        positions: int64 (batch, sequence); 0, 1, ... when None.
        learned: learned position embeddings, None for none.
        offset: row of `learned` that holds position 0 (OPT and RoBERTa: 2).
        sinusoidal: a SinusoidalPositions, None for none.

    Returns:
        (batch, sequence, hidden), in the dtype of `hidden`.
    """
    if learned is None and sinusoidal is None:
        return hidden
    if positions is None:
        positions = torch.arange(hidden.shape[1], device=hidden.device)
    if learned is not None:
        hidden = hidden + learned(positions + offset)
    if sinusoidal is not None:
        hidden = hidden + sinusoidal(positions).to(hidden.dtype)
    return hidden


class SinusoidalPositions(ComputedBuffers):
    """Sinusoidal position embeddings (Vaswani et al. 2017, section 3.5).

    The first half of the width holds the sines, the second half the cosines, as in the authors' tensor2tensor.

    Args:
        hidden: width.
    """

    def __init__(self, max_positions: int, hidden: int) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.empty(max_positions, hidden, dtype=torch.float32), persistent=False)
        self.reset_buffers(self.table.device)

    def compute_buffers(self, device: torch.device) -> None:
        """See ComputedBuffers."""
        count, hidden = self.table.shape
        exponents = torch.arange(0, hidden, 2, dtype=torch.float64, device="cpu") / hidden
        angles = torch.outer(torch.arange(count, dtype=torch.float64, device="cpu"), 1.0 / 10000.0**exponents)
        self.table = torch.cat((angles.sin(), angles.cos()), dim=1)[:, :hidden].float().to(device)

    def forward(self, positions: Tensor) -> Tensor:
        """Look up: int64 (...) -> fp32 (..., hidden)."""
        return self.table[positions]
