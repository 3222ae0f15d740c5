"""A tokenizer that was trained here or brought along, with Hugging Face `tokenizers`: what it is, and text to ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from pipeline.errors import UserError
from pipeline.files import digest

Encoded = tuple[np.ndarray, np.ndarray]
"""Token ids of several texts: the ids one text after another, uint32 (tokens,), and how many each text has, int64 (texts,)."""


def load(folder: Path, key: str = "tokenizer.path") -> Tokenizer:
    """The tokenizer of a Hugging Face folder, for text that holds no special tokens: what spells one stays text.

    Args:
        folder: holds a tokenizer.json.
        key: the configuration key that names the folder.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        fix = f"run stage=train_tokenizer with tokenizer.path={folder} first, or name a Hugging Face tokenizer folder"
        if folder.is_file():
            fix = f"import the file into a folder: stage=train_tokenizer tokenizer.source={folder} tokenizer.path=FOLDER"
        raise UserError.of(key, folder, "holds no tokenizer.json", fix)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises nothing more precise
        raise UserError.of(key, path, f"cannot be read: {error}", "fetch or train it again") from error
    # What a brought tokenizer adds, cuts or pads for its own model has no place in pretraining data.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    """The ids of each text, without any token that the tokenizer would add around it."""
    encodings = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    return np.fromiter(chain.from_iterable(encodings), np.uint32, lengths.sum()), lengths


class TextEncoder:
    """Text to ids, by a tokenizer that was trained here or brought along as a Hugging Face folder.

    Text that spells a special token stays text: no document can forge the end of another.

    Its ids are the reference that other engines are held against (pipeline/data/tokenize/engines.py).

    Attributes:
        path: its tokenizer.json.
        vocab_size: one more than the largest id.
        end_of_document: id of the token that is written after every document.
        special_tokens: the texts of all special tokens.
        fingerprint: checksum of tokenizer.json.
    """

    name = "huggingface"

    def __init__(self, folder: Path, end_of_document: str) -> None:
        """Load the tokenizer.

        Raises:
            UserError: there is none, it cannot be read, or `end_of_document` is not one of its special tokens.
        """
        self.path = path = folder / "tokenizer.json"
        self._tokenizer = load(folder)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.special_tokens = [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        if end_of_document not in vocabulary:
            fix = f"choose one of its special tokens: {', '.join(self.special_tokens[:10]) or 'it has none'}"
            raise UserError.of("tokenizer.end_of_document", end_of_document, f"is no token of {path}", fix)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = vocabulary[end_of_document]
        self.fingerprint = digest(path)
        if self.end_of_document in self.encode([end_of_document])[0].tolist():
            rule = f"is an ordinary token of {path}: documents that spell it would end there"
            raise UserError.of("tokenizer.end_of_document", end_of_document, rule, "choose one of its special tokens")

    def first_of(self, tokens: Iterable[str]) -> int | None:
        """The id of the first of these special tokens that the tokenizer has."""
        return next((self._tokenizer.token_to_id(token) for token in tokens if token in self.special_tokens), None)

    @property
    def dtype(self) -> np.dtype:
        """The smallest little-endian unsigned integer that holds every id."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text, without any token that the tokenizer would add around it."""
        return encode(self._tokenizer, texts)
