"""Heads of masked language models (Devlin et al. 2019, https://arxiv.org/abs/1810.04805, section 3.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.batch import Batch
from pipeline.layers.embedding import OutputHead
from pipeline.layers.linear import Linear
from pipeline.layers.loss import IGNORE, mean_factor
from pipeline.layers.stack import Stack


class NextSentenceHead(nn.Module):
    """Next-sentence prediction from the hidden state of the first token: output(tanh(dense(x))); or another classification.

    Args:
        hidden: width of the hidden states.
        classes: number of labels.
    """

    def __init__(self, hidden: int, classes: int = 2) -> None:
        super().__init__()
        self.dense = Linear(hidden, hidden)
        self.output = Linear(hidden, classes)

    def forward(self, hidden: Tensor, *, labels: Tensor | None = None) -> Tensor:
        """Compute the logits, or with labels the loss.

        Args:
            hidden: (batch, any, hidden); only the first position is used.
            labels: next_sentence of Batch.

        Returns:
            Logits (batch, classes), in next-sentence prediction of "follows" and "does not follow"; or the mean cross-entropy as a 0-dim
            fp32 tensor.
        """
        logits = self.output(self.dense(hidden[:, 0]).tanh())
        return logits if labels is None else F.cross_entropy(logits.float(), labels)


class ClassificationHead(nn.Module):
    """Head of sequence classification. Its first layer is BERT's pooler, which next-sentence prediction has trained.

    Args:
        hidden: width of the hidden states.
        classes: number of labels.
    """

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.sentence = NextSentenceHead(hidden, classes)

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, loss_scale: Tensor | None = None, measured: list[Tensor] | None = None
    ) -> Tensor:
        """Compute the logits, or with targets the mean cross-entropy.

        Args:
            hidden: (batch, sequence, hidden).
            targets: as in Batch; the first position of a sequence has the number of its label, the others have no target.
            loss_scale: as in Batch.
            measured: with targets, the confusion matrix is added to this list.

        Returns:
            Logits (batch, classes), or a 0-dim fp32 tensor.
        """
        logits: Tensor = self.sentence(hidden[:, :1])  # under sequence parallelism, that is all that has to be gathered
        if targets is None:
            return logits
        labels = targets[:, 0]
        if measured is not None:
            measured.append(confusion_matrix(logits, labels).flatten())
        total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
        return total / targets.numel() * mean_factor(targets, loss_scale)


def confusion_matrix(logits: Tensor, labels: Tensor) -> Tensor:
    """Count the sequences by their label (row) and by the most probable one (column), fp32 (classes, classes).

    Args:
        logits: (batch, classes).
        labels: int64 (batch,), IGNORE for a sequence that is not counted.
    """
    classes = logits.shape[1]
    rows = F.one_hot(labels.clamp(min=0), classes) * (labels != IGNORE)[:, None]
    return rows.t().float() @ F.one_hot(logits.argmax(dim=1), classes).float()


class MaskedHead(nn.Module):
    """Head of a masked language model: output(norm(gelu(dense(x)))), optionally with next-sentence prediction.

    Args:
        vocab_size: number of output tokens.
        hidden: width of the hidden states.
        norm_eps: added to the variance in LayerNorm.
        sentence: whether to add a NextSentenceHead.
        bias: whether dense and norm have a bias; output has one in any case.
    """

    def __init__(self, vocab_size: int, hidden: int, norm_eps: float, *, sentence: bool, bias: bool = True) -> None:
        super().__init__()
        self.dense = Linear(hidden, hidden, bias=bias)
        self.norm = nn.LayerNorm(hidden, eps=norm_eps, bias=bias)
        self.output = OutputHead(vocab_size, hidden, bias=True)
        self.sentence = NextSentenceHead(hidden) if sentence else None

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, loss_scale: Tensor | None = None, next_sentence: Tensor | None = None
    ) -> Tensor:
        """Compute the logits of the tokens, or with targets the masked-token loss plus, with next_sentence, the next-sentence loss.

        Args:
            hidden: (batch, sequence, hidden).
            targets: as in Batch.
            loss_scale: as in Batch; scales only the masked-token loss.
            next_sentence: as in Batch; labels of the NextSentenceHead.
        """
        result: Tensor = self.output(self.norm(F.gelu(self.dense(hidden))), targets, loss_scale)
        if targets is not None and next_sentence is not None and self.sentence is not None:
            # Only the first position: under sequence parallelism, that is all that has to be gathered.
            result = result + self.sentence(hidden[:, :1], labels=next_sentence)
        return result


class Encoder(Stack):
    """Stack whose head also predicts the next sentence, or classifies the sequence."""

    def forward_head(self, x: Tensor, context: AttentionContext, batch: Batch) -> Tensor:  # noqa: ARG002 - as in Stack
        """See Stack."""
        assert self.head is not None
        if isinstance(self.head, ClassificationHead):
            measured = None if torch.is_grad_enabled() else self.measured
            return self.head(x, batch.get("targets"), batch.get("loss_scale"), measured)
        return self.head(x, batch.get("targets"), batch.get("loss_scale"), batch.get("next_sentence"))
