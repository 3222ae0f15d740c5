"""Loading of a Hugging Face tokenizer.json, from stage=train_tokenizer or another tool, and encoding of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from pipeline.common.atomic_files import digest
from pipeline.common.errors import UserError

Encoded = tuple[np.ndarray, np.ndarray]
"""Token ids of several texts: the concatenated ids, uint32 (tokens,), and the number of ids of each text, int64 (texts,)."""


def load(folder: Path, key: str = "tokenizer.path") -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder. Text that spells a special token is encoded as ordinary text.

    Args:
        folder: contains tokenizer.json.
        key: the configuration key of the folder, for messages.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        fix = f"run stage=train_tokenizer with tokenizer.path={folder} first, or set an existing Hugging Face tokenizer folder"
        if folder.is_file():
            fix = f"import the file into a folder: stage=train_tokenizer tokenizer.source={folder} tokenizer.path=FOLDER"
        raise UserError.of(key, folder, "holds no tokenizer.json", fix)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises no more specific type
        raise UserError.of(key, path, f"cannot be read: {error}", "download or train it again") from error
    # Pretraining data requires the ids of the full text, whatever truncation and padding the tokenizer defines for its own model.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    """The ids of each text, without the special tokens of the post-processor."""
    encodings = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    return np.fromiter(chain.from_iterable(encodings), np.uint32, lengths.sum()), lengths


class TextEncoder:
    """Encodes text with the tokenizer of a Hugging Face folder.

    Text that spells a special token is encoded as ordinary text, so that a document cannot contain an end-of-document token.

    Its ids are the reference for other engines (pipeline/data/tokenize/encoders.py).

    Attributes:
        path: of tokenizer.json.
        vocab_size: one more than the largest id.
        end_of_document: id of the token that is written after every document.
        special_tokens: the texts of all special tokens.
        fingerprint: checksum of tokenizer.json.
    """

    name = "huggingface"

    def __init__(self, folder: Path, end_of_document: str) -> None:
        """Load the tokenizer.

        Raises:
            UserError: the tokenizer is missing or cannot be read, or `end_of_document` is not one of its special tokens.
        """
        self.path = path = folder / "tokenizer.json"
        self._tokenizer = load(folder)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.special_tokens = [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        if end_of_document not in vocabulary:
            fix = f"choose one of its special tokens: {', '.join(self.special_tokens[:10]) or 'it has none'}"
            raise UserError.of("tokenizer.end_of_document", end_of_document, f"is not a token of {path}", fix)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = vocabulary[end_of_document]
        self.fingerprint = digest(path)
        if self.end_of_document in self.encode([end_of_document])[0].tolist():
            rule = f"is an ordinary token of {path}: a document whose text contains it would end there"
            raise UserError.of("tokenizer.end_of_document", end_of_document, rule, "choose one of its special tokens")

    def first_of(self, tokens: Iterable[str]) -> int | None:
        """The id of the first of `tokens` that is a special token of the tokenizer; None if none is."""
        return next((self._tokenizer.token_to_id(token) for token in tokens if token in self.special_tokens), None)

    @property
    def dtype(self) -> np.dtype:
        """The smallest little-endian unsigned integer type that can represent every id: uint16 or uint32."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text, without the special tokens of the post-processor."""
        return encode(self._tokenizer, texts)
