"""Goldfish loss (Hans et al. 2024, https://arxiv.org/abs/2406.10209): some targets have no loss, so that no text can be recited.

Whether a target is dropped is a hash of the `context` tokens before it in its document: all copies of a text lose the same targets,
wherever a copy is in a sample, in which run, on which rank. What has fewer tokens before it cannot be hashed:

- at the begin of a document, the first `context` targets are kept, in every copy;
- at the begin of a sample, up to `context` targets are dropped if their document may have begun before the sample: they may be targets that
  are dropped elsewhere.

The target after an end-of-document token is the first token of the next document.
"""

from __future__ import annotations

import numpy as np

from pipeline.data.load.permutation import random_words

#: Odd factor of the polynomial over the tokens of a context, modulo 2**64.
_FACTOR = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64
#: Seeds of the numbers that stand for tokens, and of the last hash; the same in all runs.
_TOKENS, _CONTEXTS = 0, 1


def dropped(text: np.ndarray, end_of_document: int, every: int, context: int) -> np.ndarray:
    """Return which targets have no loss.

    Args:
        text: (n, length + 1) tokens; the target of a position is the next token.
        end_of_document: the token that closes a document.
        every: one of so many targets is dropped on average (k in the paper).
        context: number of tokens that are hashed (h in the paper).

    Returns:
        bool (n, length).
    """
    inputs = text[:, :-1]
    rows, length = inputs.shape
    last_end = np.maximum.accumulate(np.where(inputs == end_of_document, np.arange(length), -1), axis=1)
    is_known = np.arange(length) - last_end >= context
    words = random_words(_TOKENS, inputs.ravel(), count=1)[0].reshape(rows, length)
    sums = np.zeros_like(words)
    for back in range(min(context, length)):
        sums[:, back:] += words[:, : length - back] * np.uint64(pow(_FACTOR, back, _MODULUS))
    hashes = random_words(_CONTEXTS, sums.ravel(), count=1)[0].reshape(rows, length)
    return np.where(is_known, hashes < np.uint64(_MODULUS // every), last_end < 0)
