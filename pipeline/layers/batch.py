"""Inputs of a forward pass other than tokens, with the names that data, models and pipeline stages share."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class Batch(TypedDict, total=False):
    """Tensors of a micro-batch; dim 0 of each is the batch. A model raises for keys that it does not support.

    Attributes:
        targets: int64 (batch, sequence), the label of each position, IGNORE (layers/loss.py) for none. Without it, a model returns logits.
        loss_scale: fp32 (batch,), the same number in every row: number of positions / number of targets other than IGNORE, of the global
            batch over whose targets the loss is averaged. Or fp32 (batch, sequence): this number times a weight of each position.
        loss_weights: fp32 (batch, sequence), weight of the loss of each position; the loss is divided by the number of positions with one
            above 0, instead of that of targets. The trainer makes it a loss_scale, and no model gets it.
        documents: int (batch, sequence), the document of each token, -1 for padding; without it, tokens attend across documents.
        positions: int64 (batch, sequence), the position of each token in its sequence; 0, 1, ... without it.
        segments: int64 (batch, sequence), 0 or 1: the segment of each token (BERT).
        next_sentence: int64 (batch,), 0 if the second segment follows the first, 1 if it is taken from elsewhere (BERT).
        decoder_tokens: int64 (batch, decoder sequence), input of the decoder of an encoder-decoder; the tokens are the encoder's.
        choices: int64 (batch, sequence), 1 for positions of a preferred answer, -1 for those of the answer that it is preferred to, 0 for
            padding; each row has both. The model then returns the loss of preferences (layers/preference.py).
        per_sequence: (batch,), any number: the model returns the sum of the loss over the targets of each sequence, fp32 (batch, 1).
        teacher_tokens: int32 (batch, sequence, k), and
        teacher_log_probabilities: fp16 (batch, sequence, k + 1), what a teacher predicts at each position (layers/teacher.py).
        reference: fp32 (batch, 2), the log-probabilities of both answers under the reference model; 0 for losses without one.
    """

    targets: Tensor
    loss_scale: Tensor
    loss_weights: Tensor
    documents: Tensor
    positions: Tensor
    segments: Tensor
    next_sentence: Tensor
    decoder_tokens: Tensor
    choices: Tensor
    teacher_tokens: Tensor
    teacher_log_probabilities: Tensor
    reference: Tensor
    per_sequence: Tensor
