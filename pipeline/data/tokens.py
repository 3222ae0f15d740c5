"""Token shards: a WebDataset tar on the outside, one numpy array that is addressed by file offset on the inside.

A shard is one sample: `.json` says what it holds, `.lengths.npy` (uint32, documents) the tokens of every document, `.tokens.npy`
(uint16 or uint32, tokens) the documents one after another, each closed by the end-of-document token.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import artifact
from pipeline.data import tar
from pipeline.data.tokenizer import TextEncoder
from pipeline.files import atomic_file

BATCH_BYTES = 1 << 20
"""Text that is handed to the tokenizer at once."""


def write(text_shard: Path, path: Path, encoder: TextEncoder, progress: Callable[[int], None]) -> dict[str, Any]:
    """Tokenize one text shard.

    Args:
        progress: told the bytes of text as they are done.

    Returns:
        The manifest's entry: besides length and checksum the dtype, the offset of the first token in the file, and counts.
    """
    ids: list[np.ndarray] = []
    text_bytes = 0
    for batch in _batches(text_shard):
        ids.extend(encoder.encode([text.decode("utf-8") for text in batch]))
        done = sum(map(len, batch))
        text_bytes += done
        progress(done)
    lengths = np.array([len(document) + 1 for document in ids], dtype="<u4")
    end = np.array([encoder.end_of_document], dtype=encoder.dtype)
    tokens = np.concatenate([part for document in ids for part in (document, end)])

    about = {"dtype": tokens.dtype.name, "tokens": len(tokens), "documents": len(ids), "text_bytes": text_bytes}
    described = {**about, "vocab_size": encoder.vocab_size, "end_of_document": encoder.end_of_document, "tokenizer": encoder.fingerprint}
    stem, array = path.name.removesuffix(".tar"), _npy(tokens)
    head = tar.member(f"{stem}.json", json.dumps(described).encode())
    lengths_offset = len(head) + tar.BLOCK + len(_npy(lengths)) - lengths.nbytes
    head += tar.member(f"{stem}.lengths.npy", _npy(lengths))
    with atomic_file(path) as handle:
        handle.write(head)
        handle.write(tar.member(f"{stem}.tokens.npy", array))
        handle.write(tar.END)
    return artifact.entry(path, offset=len(head) + tar.BLOCK + len(array) - tokens.nbytes, lengths_offset=lengths_offset, **about)


def _batches(text_shard: Path) -> Iterator[list[bytes]]:
    """The shard's documents, about BATCH_BYTES at a time."""
    batch: list[bytes] = []
    for name, content in tar.members(text_shard):
        if name.endswith(".txt"):
            batch.append(content)
            if sum(map(len, batch)) >= BATCH_BYTES:
                yield batch
                batch = []
    if batch:
        yield batch


def _npy(array: np.ndarray) -> bytes:
    """The array as a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
