"""Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2; equations 21 to 25)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.linear import Linear
from pipeline.layers.loss import IGNORE


class MTPModule(nn.Module):
    """One further token ahead: a block on what was known before and the next token.

    Args:
        hidden: width.
        eps: of the norms.
        block: a transformer block.
    """

    def __init__(self, hidden: int, eps: float, block: nn.Module) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.project = Linear(2 * hidden, hidden, bias=False)
        self.block = block
        self.final_norm = nn.RMSNorm(hidden, eps=eps)

    def forward(self, tokens: Tensor, hidden: Tensor, context: AttentionContext) -> Tensor:
        """What the head and the next depth take.

        Args:
            tokens: (batch, sequence, hidden), embeddings of the tokens so many places ahead.
            hidden: (batch, sequence, hidden), of the depth before.
            context: of the model's blocks.
        """
        joined = self.project(torch.cat([self.token_norm(tokens), self.hidden_norm(hidden)], dim=2))
        return self.final_norm(self.block(joined, context))


class MultiTokenHead(nn.Module):
    """The output head, and the depths that predict further ahead with the same embedding and head.

    Args:
        output: hidden states to logits or loss.
        embed: the model's own embedding.
        depths: in order; the first predicts the token after the next.
        factor: of the mean of the depths' losses in the model's.
    """

    def __init__(self, output: OutputHead, embed: Embedding, depths: Iterable[nn.Module], factor: float) -> None:
        super().__init__()
        self.output = output
        self.depths = nn.ModuleList(depths)
        self.embed = embed if len(self.depths) else None
        self.factor = factor

    def forward(self, hidden: Tensor, context: AttentionContext, targets: Tensor | None = None, loss_scale: Tensor | None = None) -> Tensor:
        """Logits of the next token, or the loss: while there are gradients, with that of the depths.

        Args:
            hidden: (batch, sequence, hidden), normalised.
            context: of the model's blocks.
            targets: as in Batch.
            loss_scale: as in Batch, of the next token's loss.
        """
        loss: Tensor = self.output(hidden, targets, loss_scale)
        if targets is None or self.embed is None or not torch.is_grad_enabled():
            return loss
        total = torch.zeros_like(loss)
        labels = targets
        for depth in self.depths:
            # A place without a token is looked at by none whose label counts: it lies behind them, or its own label is ignored.
            hidden = depth(self.embed(labels.clamp(min=0)), hidden, context)
            labels = ahead(labels)
            total = total + self.output(hidden, labels)
        return loss + self.factor / len(self.depths) * total


def ahead(labels: Tensor) -> Tensor:
    """Each place gets its successor's label, IGNORE where it has none or has no label itself: int64 (batch, sequence)."""
    moved = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)], dim=1)
    return moved.masked_fill(labels == IGNORE, IGNORE)
