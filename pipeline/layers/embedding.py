"""From token ids to vectors, and back to the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers import linear
from pipeline.layers.loss import linear_cross_entropy, mean_factor
from pipeline.layers.table import Table


class Embedding(nn.Module):
    """A vector for every token, with what a family adds to it.

    Args:
        vocab_size: rows.
        hidden: width.
        max_positions: learned positions, None for none.
        position_offset: rows of the table of positions before that of position 0 (OPT and RoBERTa: 2).
        segments: learned segments (BERT: 2), 0 for none.
        norm: of the sum, None for none.
        factor: of the tokens' vectors, before anything is added (Vaswani et al. 2017, section 3.4: sqrt(hidden)).
        sinusoidal: positions as sines and cosines (section 3.5) instead of learned ones; max_positions of them.
        width: of the tokens' vectors, which are then projected to hidden (opt-350m); hidden when None.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        max_positions: int | None = None,
        *,
        position_offset: int = 0,
        segments: int = 0,
        norm: nn.Module | None = None,
        factor: float = 1.0,
        sinusoidal: bool = False,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.tokens = linear.Embedding(vocab_size, width or hidden)
        self.project = linear.Linear(width, hidden, bias=False) if width else None
        learned = max_positions is not None and not sinusoidal
        self.positions = linear.Embedding(max_positions + position_offset, hidden) if max_positions and learned else None
        self.segments = linear.Embedding(segments, hidden) if segments else None
        self.waves = Sinusoids(max_positions, hidden) if max_positions and sinusoidal else None
        self.norm = norm
        self.position_offset, self.factor = position_offset, factor

    def forward(self, tokens: Tensor, positions: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Look up.

        Args:
            tokens: int64 (batch, sequence).
            positions: int64 (batch, sequence), 0, 1, ... when None.
            segments: int64 (batch, sequence), all 0 when None.

        Returns:
            (batch, sequence, hidden).
        """
        hidden = self.tokens(tokens)
        if self.factor != 1.0:
            hidden = hidden * self.factor
        if self.project is not None:
            hidden = self.project(hidden)
        if positions is None and (self.positions is not None or self.waves is not None):
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.positions is not None and positions is not None:
            hidden = hidden + self.positions(positions + self.position_offset)
        if self.waves is not None and positions is not None:
            hidden = hidden + self.waves(positions).to(hidden.dtype)
        if self.segments is not None:
            hidden = hidden + self.segments(torch.zeros_like(tokens) if segments is None else segments)
        return hidden if self.norm is None else self.norm(hidden)


class Sinusoids(Table):
    """Sines in the first half of the width, cosines in the second (section 3.5, in the order of its reference code)."""

    def __init__(self, max_positions: int, hidden: int) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.empty(max_positions, hidden, dtype=torch.float32), persistent=False)
        self.reset_buffers(self.table.device)

    def reset_buffers(self, device: torch.device) -> None:
        """See Table."""
        count, hidden = self.table.shape
        exponents = torch.arange(0, hidden, 2, dtype=torch.float64, device="cpu") / hidden
        angles = torch.outer(torch.arange(count, dtype=torch.float64, device="cpu"), 1.0 / 10000.0**exponents)
        self.table = torch.cat((angles.sin(), angles.cos()), dim=1)[:, :hidden].float().to(device)

    def forward(self, positions: Tensor) -> Tensor:
        """(...) -> (..., hidden), fp32."""
        return self.table[positions]


class OutputHead(nn.Module):
    """The projection to the vocabulary, and the loss.

    Args:
        vocab_size: rows.
        hidden: width.
        bias: whether a bias is added (BERT).
        factor: of the hidden states (T5 with tied embeddings: 1 / sqrt(hidden)).
        label_smoothing: share of the target that is spread over the vocabulary (Szegedy et al. 2016).
        width: of the vectors that are compared with hidden states, which are projected to it first (opt-350m); hidden when None.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        *,
        bias: bool = False,
        factor: float = 1.0,
        label_smoothing: float = 0.0,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.project = linear.Linear(hidden, width, bias=False) if width else None
        self.weight = nn.Parameter(torch.empty(vocab_size, width or hidden))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.factor, self.label_smoothing = factor, label_smoothing

    def forward(self, hidden: Tensor, targets: Tensor | None = None, loss_scale: Tensor | None = None) -> Tensor:
        """Logits, or with targets the loss (without the logits of the whole batch in memory).

        Args:
            hidden: (batch, sequence, hidden).
            targets: as in Batch.
            loss_scale: as in Batch; the mean over this batch's counted targets when None.

        Returns:
            Logits (batch, sequence, vocabulary), or the mean cross-entropy as a 0-dim fp32 tensor.
        """
        if self.project is not None:
            hidden = self.project(hidden)
        if self.factor != 1.0:
            hidden = hidden * self.factor
        if targets is None:
            return F.linear(hidden, self.weight, self.bias)
        loss = linear_cross_entropy(hidden, self.weight, targets, bias=self.bias, label_smoothing=self.label_smoothing)
        return loss * mean_factor(targets, loss_scale)
