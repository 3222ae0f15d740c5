"""Perplexity of a decoder on token sequences, in one process."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipeline.common.progress import Progress
from pipeline.layers.stack import Stack

#: Sequences of a forward pass.
_BATCH = 8


def perplexity(model: Stack, sequences: Tensor, label: str) -> float:
    """Return exp of the mean loss of the next token.

    Args:
        model: a decoder.
        sequences: int64 (sequences, length + 1).
        label: name of the task in the progress report.
    """
    total = 0.0
    with torch.inference_mode(), Progress(len(sequences), label, "sequences") as progress:
        for batch in sequences.split(_BATCH):
            total += float(model(batch[:, :-1], targets=batch[:, 1:])) * len(batch)
            progress.advance(len(batch))
    return math.exp(min(total / len(sequences), 700.0))
