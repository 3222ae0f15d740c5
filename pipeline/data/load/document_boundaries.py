"""Where do documents begin and end within sequences? The answer in the three forms that attention kernels and masks require."""

from __future__ import annotations

import numpy as np


def document_ids(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """The document of each token, counted from 0 within its sequence. The end-of-document token belongs to the document that it closes.

    Args:
        tokens: (batch, sequence) input tokens.

    Returns:
        (batch, sequence) int32.
    """
    ids = np.zeros(tokens.shape, dtype=np.int32)
    np.cumsum(tokens[:, :-1] == end_of_document, axis=1, out=ids[:, 1:])
    return ids


def cumulative_lengths(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """The boundaries of all documents in the flattened batch: `cu_seqlens` of FlashAttention's variable-length kernels.

    Args:
        tokens: (batch, sequence) input tokens. A document that is split over two sequences counts as one in each.

    Returns:
        (documents + 1,) int32: document d of the flattened batch is tokens [d] to [d + 1].
    """
    closes = tokens == end_of_document
    closes[:, -1] = True
    # End tokens are rare: find the words of eight tokens that contain one first, where the size is a multiple of eight.
    flat = closes.reshape(-1)
    if flat.size % 8 == 0:
        words = np.flatnonzero(flat.view(np.uint64))
        rows, columns = np.nonzero(flat.reshape(-1, 8)[words])
        ends = words[rows] * 8 + columns
    else:
        ends = np.flatnonzero(flat)
    bounds = np.zeros(len(ends) + 1, dtype=np.int32)
    bounds[1:] = ends + 1
    return bounds


def positions(bounds: np.ndarray) -> np.ndarray:
    """The position of each token within its document, counted from 0.

    Args:
        bounds: (documents + 1,) from cumulative_lengths.

    Returns:
        (tokens,) int32, of the flattened batch.
    """
    return np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], np.diff(bounds))
