"""Token sequences of given documents: what GPTQ calibrates with, and what perplexity is measured on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.config.data import DataConfig
from pipeline.data.read import reader
from pipeline.data.tokenize.tokenizer import TextEncoder

#: Tokens of a sequence at most, for models of any context.
LENGTH = 2048


def read_sequences(inputs: Sequence[str], key: str, data: DataConfig, encoder: TextEncoder, *, tokens: int, longest: int) -> Tensor:
    """Read documents, join their tokens with end-of-document tokens in between, and cut them into sequences.

    Args:
        inputs: files, folders, globs or URLs.
        key: configuration key of the inputs.
        data: options of reading.
        tokens: number of tokens to read at most.
        longest: tokens of a sequence at most.

    Returns:
        int64 (sequences, length + 1), neighbors sharing a token, as in pretraining. The length is that of all tokens if they are few.

    Raises:
        UserError: an input does not exist, or the documents hold no text.
    """
    ids: list[int] = []
    begin = [] if encoder.bos is None else [encoder.bos]
    for text in reader.texts(inputs, key, data):
        ids += [*begin, *encoder.encode([text])[0].tolist(), encoder.end_of_document]
        if len(ids) >= tokens:
            break
    ids = ids[:tokens]
    if len(ids) < 2:
        raise UserError.of(key, ", ".join(inputs), "holds no text", "set it to other documents")
    length = min(longest, LENGTH, len(ids) - 1)
    return torch.tensor(ids).unfold(0, length + 1, length)
