"""Token embedding and output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers import linear
from pipeline.layers.loss import linear_cross_entropy, mean_factor, position_weights
from pipeline.layers.mask import capped
from pipeline.layers.positions import SinusoidalPositions, add_position_embeddings
from pipeline.layers.teacher import Teacher


class Embedding(nn.Module):
    """Token embeddings, plus the position and segment embeddings of the family. Positions are added by layers/positions.py.

    Args:
        vocab_size: number of token embeddings.
        hidden: width of the output.
        max_positions: number of position embeddings, None for none.
        position_offset: row of the learned position embeddings that holds position 0 (OPT and RoBERTa: 2).
        segments: number of learned segment embeddings (BERT: 2), 0 for none.
        norm: applied to the sum, None for none.
        factor: scales the token embeddings before positions and segments are added (Vaswani et al. 2017, section 3.4: sqrt(hidden)).
        sinusoidal: use sinusoidal position embeddings (section 3.5) instead of learned ones.
        width: width of the token embeddings, which are then projected to hidden (opt-350m); hidden when None.
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
        self.tokens = linear.LookupTable(vocab_size, width or hidden)
        self.project = linear.Linear(width, hidden, bias=False) if width else None
        learned = max_positions is not None and not sinusoidal
        self.positions = linear.LookupTable(max_positions + position_offset, hidden) if max_positions and learned else None
        self.segments = linear.LookupTable(segments, hidden) if segments else None
        self.sinusoids = SinusoidalPositions(max_positions, hidden) if max_positions and sinusoidal else None
        self.norm = norm
        self.position_offset, self.factor = position_offset, factor

    def forward(self, tokens: Tensor, positions: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Embed tokens.

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
        hidden = add_position_embeddings(hidden, positions, learned=self.positions, offset=self.position_offset, sinusoidal=self.sinusoids)
        if self.segments is not None:
            hidden = hidden + self.segments(torch.zeros_like(tokens) if segments is None else segments)
        return hidden if self.norm is None else self.norm(hidden)


class OutputHead(nn.Module):
    """Projection to the vocabulary, fused with the cross-entropy loss when targets are passed.

    Args:
        vocab_size: number of output tokens.
        hidden: width of the hidden states.
        bias: whether a bias is added to the logits (BERT).
        factor: scales the hidden states (T5 with tied embeddings: 1 / sqrt(hidden)).
        label_smoothing: probability mass of the target that is spread over the vocabulary (Szegedy et al. 2016).
        softcap: bound of the logits, as in Mask (layers/mask.py); None for none.
        width: width of the output embeddings, to which the hidden states are projected first (opt-350m); hidden when None.

    Attributes:
        z_loss, teacher_weight: as in linear_cross_entropy; set_loss sets them.
    """

    z_loss, teacher_weight = 0.0, 1.0

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        *,
        bias: bool = False,
        factor: float = 1.0,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.project = linear.Linear(hidden, width, bias=False) if width else None
        self.weight = nn.Parameter(torch.empty(vocab_size, width or hidden))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.factor, self.label_smoothing, self.softcap = factor, label_smoothing, softcap

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, loss_scale: Tensor | None = None, teacher: Teacher | None = None
    ) -> Tensor:
        """Compute the logits, or with targets the loss, without materializing the logits of the full batch.

        Args:
            hidden: (batch, sequence, hidden).
            targets: as in Batch.
            loss_scale: as in Batch; when None, the loss is the mean over this batch's targets other than IGNORE.
            teacher: as in linear_cross_entropy.

        Returns:
            Logits (batch, sequence, vocabulary), or the mean loss as a 0-dim fp32 tensor.
        """
        if self.project is not None:
            hidden = self.project(hidden)
        if self.factor != 1.0:
            hidden = hidden * self.factor
        if targets is None:
            logits = F.linear(hidden, self.weight, self.bias)
            return logits if self.softcap is None else capped(logits, self.softcap)
        loss = linear_cross_entropy(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            weights=position_weights(loss_scale),
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            teacher=teacher,
            teacher_weight=self.teacher_weight,
        )
        return loss * mean_factor(targets, loss_scale)


def set_loss(model: nn.Module, z_loss: float, teacher_weight: float = 1.0) -> None:
    """Set weights of the loss (see linear_cross_entropy) of all projections to the vocabulary, whole or sharded."""
    for module in model.modules():
        if hasattr(module, "z_loss"):
            module.z_loss, module.teacher_weight = z_loss, teacher_weight  # type: ignore[assignment] # numbers, not modules
