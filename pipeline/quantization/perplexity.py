"""Perplexity of a decoder on token sequences, in one process."""

from __future__ import annotations

import math

from torch import Tensor

from pipeline.common.progress import Progress
from pipeline.quantization.blocks import BlockByBlock


def perplexity(model: BlockByBlock, sequences: Tensor, label: str) -> float:
    """Return exp of the mean loss of the next token.

    Args:
        model: a decoder.
        sequences: int64 (sequences, length + 1).
        label: name of the task in the progress report.
    """
    hidden, total = model.embed(sequences[:, :-1]), 0.0
    with Progress(len(model), label, "blocks") as progress:
        for name, block in model.blocks():
            model.apply(block, hidden)
            progress.advance(1, name)
    for loss, batch in zip(model.losses(hidden, sequences[:, 1:]), hidden, strict=True):
        total += loss * len(batch)
    return math.exp(min(total / len(sequences), 700.0))
