"""Heads of masked language models (Devlin et al. 2019, https://arxiv.org/abs/1810.04805, section 3.1)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.embedding import OutputHead
from pipeline.layers.linear import Linear


class SentenceHead(nn.Module):
    """Whether the second sentence follows the first, from the first token: output(tanh(dense(x)))."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense = Linear(hidden, hidden)
        self.output = Linear(hidden, 2)

    def forward(self, hidden: Tensor, *, labels: Tensor | None = None) -> Tensor:
        """Logits, or with labels the loss.

        Args:
            hidden: (batch, any, hidden), of which the first position is read.
            labels: next_sentence of Batch.

        Returns:
            Logits (batch, 2): follows, comes from elsewhere; or the mean cross-entropy as a 0-dim fp32 tensor.
        """
        logits = self.output(self.dense(hidden[:, 0]).tanh())
        return logits if labels is None else F.cross_entropy(logits.float(), labels)


class MaskedHead(nn.Module):
    """output(norm(gelu(dense(x)))), and with `sentence` the loss of the next sentence on top.

    Args:
        vocab_size: rows.
        hidden: width.
        norm_eps: added to the variance in LayerNorm.
        sentence: whether there is a SentenceHead.
    """

    def __init__(self, vocab_size: int, hidden: int, norm_eps: float, *, sentence: bool) -> None:
        super().__init__()
        self.dense = Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=norm_eps)
        self.output = OutputHead(vocab_size, hidden, bias=True)
        self.sentence = SentenceHead(hidden) if sentence else None

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, loss_scale: Tensor | None = None, next_sentence: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens, or with targets the loss: of the tokens and, with next_sentence, of the sentences.

        Args:
            hidden: (batch, sequence, hidden).
            targets: as in Batch, like those below.
            loss_scale: of the tokens' loss alone.
            next_sentence: for the SentenceHead.
        """
        result: Tensor = self.output(self.norm(F.gelu(self.dense(hidden))), targets, loss_scale)
        if targets is not None and next_sentence is not None and self.sentence is not None:
            # The first position alone: where the rest is cut along the sequence, that is all that must be brought together.
            result = result + self.sentence(hidden[:, :1], labels=next_sentence)
        return result
