"""Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2; equations 21 to 25)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.batch import Batch
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.linear import Linear
from pipeline.layers.loss import IGNORE
from pipeline.layers.preference import log_probabilities
from pipeline.layers.stack import BiasedMoEStack
from pipeline.layers.teacher import Teacher, teacher_of


class MTPModule(nn.Module):
    """MTP module: predicts one token further from the hidden states of the previous depth and the embedding of the next token.

    Args:
        hidden: width of the residual stream.
        eps: added to the mean square in RMSNorm.
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
        """Return the hidden states for the output head and the next depth, (batch, sequence, hidden).

        Args:
            tokens: (batch, sequence, hidden), embeddings of the tokens shifted by this module's depth.
            hidden: (batch, sequence, hidden), hidden states of the previous depth.
            context: attention context of the model's blocks.
        """
        projected = self.project(torch.cat([self.token_norm(tokens), self.hidden_norm(hidden)], dim=2))
        return self.final_norm(self.block(projected, context))


class MultiTokenHead(nn.Module):
    """Output head with MTP modules, which share the model's embedding and output projection.

    Args:
        output: output projection and loss.
        embed: the model's embedding.
        depths: the MTP modules in order; the first predicts the token after the next.

    Attributes:
        factor: weight of the mean MTP loss in the training loss; the model's set_loss_weights sets it.
    """

    def __init__(self, output: OutputHead, embed: Embedding, depths: Iterable[nn.Module]) -> None:
        super().__init__()
        self.output = output
        self.depths = nn.ModuleList(depths)
        self.embed = embed if len(self.depths) else None
        self.factor = 1.0

    def forward(
        self,
        hidden: Tensor,
        context: AttentionContext,
        targets: Tensor | None = None,
        loss_scale: Tensor | None = None,
        teacher: Teacher | None = None,
    ) -> Tensor:
        """Compute the logits of the next token, or with targets the loss; with gradients enabled, the MTP loss is added.

        Args:
            hidden: (batch, sequence, hidden), output of the final norm.
            context: attention context of the model's blocks.
            targets: as in Batch.
            loss_scale: as in Batch; scales only the loss of the next token.
            teacher: of the next token; the further ones have the cross-entropy.
        """
        loss: Tensor = self.output(hidden, targets, loss_scale, teacher)
        if targets is None or self.embed is None or not torch.is_grad_enabled():
            return loss
        total = torch.zeros_like(loss)
        labels = targets
        for depth in self.depths:
            # A position with label IGNORE (token 0 here) affects no loss: positions that attend to it are later, or are IGNORE themselves.
            hidden = depth(self.embed(labels.clamp(min=0)), hidden, context)
            labels = shift_labels(labels)
            total = total + self.output(hidden, labels)
        return loss + self.factor / len(self.depths) * total


def shift_labels(labels: Tensor) -> Tensor:
    """Shift labels to the left by one, int64 (batch, sequence); IGNORE at the end and where the unshifted label is IGNORE."""
    shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)], dim=1)
    return shifted.masked_fill(labels == IGNORE, IGNORE)


class MultiTokenStack(BiasedMoEStack):
    """Stack with MTP modules in the head, and with DeepSeek-V3's losses of its MoE layers."""

    def forward_head(self, x: Tensor, context: AttentionContext, batch: Batch) -> Tensor:
        """See Stack."""
        assert self.head is not None
        assert self.norm is not None
        if "choices" in batch:  # without MTP modules, which this objective refuses
            return self._preferences(log_probabilities(self.head.output, self.norm(x), batch), batch)  # type: ignore[arg-type] # an OutputHead
        return self.head(self.norm(x), context, batch.get("targets"), batch.get("loss_scale"), teacher_of(batch))

    def set_loss_weights(self, weights: Mapping[str, float]) -> None:
        """See Stack."""
        super().set_loss_weights(weights)
        if isinstance(self.head, MultiTokenHead):
            self.head.factor = weights.get("mtp_loss", 0.0)
