"""What a forward pass is given beside tokens: one table of names for data, models and pipeline."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class Batch(TypedDict, total=False):
    """Tensors of a micro-batch; the first dim of each counts sequences. A model takes what it knows and refuses the rest.

    Attributes:
        targets: int64 (batch, sequence), the label of each position, IGNORE (layers/loss.py) where there is none. Logits without it.
        loss_scale: fp32 (batch,), the same number in every row: positions over counted targets of the whole batch, whose mean the loss is.
        documents: int (batch, sequence), the document of each token, -1 for padding; no rule where it is missing.
        positions: int64 (batch, sequence), the place of each token in its sequence; 0, 1, ... where it is missing.
        segments: int64 (batch, sequence), 0 or 1: which of two sentences a token belongs to.
        next_sentence: int64 (batch,), 0 where the second sentence follows the first, 1 where it comes from elsewhere (BERT).
        decoder_tokens: int64 (batch, decoder sequence), what the decoder of an encoder-decoder reads; tokens are the encoder's.
    """

    targets: Tensor
    loss_scale: Tensor
    documents: Tensor
    positions: Tensor
    segments: Tensor
    next_sentence: Tensor
    decoder_tokens: Tensor
