"""Tokens of chats, encoded in pieces: the text before an answer has the same tokens whatever the answer begins with.

Encoded at once, a space at the end of a prompt or at the begin of an answer would be merged across the boundary, and the model would
learn to answer prompts that it never gets: stage=generate encodes the prompt before there is an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer

#: Encoded before a piece, and removed: after the first that does not merge with it, a piece has the tokens that it has within a text.
_CONTEXTS = ("\n", "x", ".", "0")
#: Tokens of a chat, and the characters [first, last) that each stands for, int64 (tokens, 2).
Encoded = tuple[list[int], np.ndarray]


class ChatEncoder:
    """Encodes the texts of chat templates, which write special tokens as text; the tokenizer has no truncation and padding."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {number: token.content for number, token in added.items()}
        self.special = frozenset(number for number, token in added.items() if token.special)
        # SentencePiece and others add a space at the begin of every text.
        tokenizer.encode_special_tokens = False
        alone, within, before = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("x", "\nx", "\n"))
        self._adds_space = alone != within[len(before) :]

    def encode(self, texts: Sequence[tuple[str, Sequence[int]]]) -> list[Encoded]:
        """Encode texts, each with the characters at which an answer begins, in order. No token extends over one of them."""
        cuts = [[0, *(place for place in places if 0 < place < len(text)), len(text)] for text, places in texts]
        pieces = [text[first:last] for (text, _), bounds in zip(texts, cuts, strict=True) for first, last in pairwise(bounds)]
        starts = [first for bounds in cuts for first in bounds[:-1]]
        self._tokenizer.encode_special_tokens = False
        encoded = iter(zip(self._tokenizer.encode_batch(pieces, add_special_tokens=False), pieces, starts, strict=True))
        whole = []
        for bounds in cuts:
            tokens: list[int] = []
            offsets = [np.zeros((0, 2), dtype=np.int64)]
            for _ in bounds[:-1]:
                encoding, piece, start = next(encoded)
                after_text = tokens and self._adds_space
                ids, places = self._within(piece, self._added.get(tokens[-1])) if after_text else (encoding.ids, encoding.offsets)
                tokens += ids
                offsets.append(np.array(places, dtype=np.int64).reshape(-1, 2) + start)
            whole.append((tokens, np.concatenate(offsets)))
        return whole

    def _within(self, piece: str, special: str | None) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a piece as after a text, or after a special token."""
        for context in _CONTEXTS if special is None else (special,):
            before = self._tokenizer.encode(context, add_special_tokens=False).ids
            encoding = self._tokenizer.encode(context + piece, add_special_tokens=False)
            count, length = len(before), len(context)
            first = encoding.offsets[count][0] if len(encoding.ids) > count else length
            if encoding.ids[:count] == before and first >= length:
                return encoding.ids[count:], [(first - length, last - length) for first, last in encoding.offsets[count:]]
        encoding = self._tokenizer.encode(piece, add_special_tokens=False)
        return encoding.ids, encoding.offsets
