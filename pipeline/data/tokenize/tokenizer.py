"""Loading of a Hugging Face tokenizer.json, from stage=train_tokenizer or another tool, and encoding of text."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from pipeline.common.atomic_files import digest
from pipeline.common.errors import UserError
from pipeline.config.data import TokenizerConfig

log = logging.getLogger("pipeline")

_NO_TEXT = "\U0010ffff\ue000" * 8
"""Begins the names of entries that no text spells: characters without a meaning, in an order that no text has."""

Encoded = tuple[np.ndarray, np.ndarray]
"""Token ids of several texts: the concatenated ids, uint32 (tokens,), and the number of ids of each text, int64 (texts,)."""


Affixes = tuple[list[int], list[int]]
"""Token ids before and after a text."""


def load(folder: Path, key: str = "tokenizer.path") -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder. Text that spells a special token is encoded as ordinary text.

    Args:
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


def check_same(folder: Path, fingerprint: str | None, source: str, fix: str, trained: Path | None = None) -> None:
    """Refuse a tokenizer that gives text other ids than the one that tokens or weights were made with.

    Args:
        folder: of the tokenizer that a stage uses; without tokenizer.json there is nothing to compare.
        fingerprint: checksum of the tokenizer.json of the tokens or weights; None if it is not known.
        trained: folder of the tokenizer of the weights. Other special tokens or another post-processor than there are no difference.

    Raises:
        UserError: it is another tokenizer.
    """
    path = folder / "tokenizer.json"
    if fingerprint is None or not path.is_file() or digest(path) == fingerprint:
        return
    if trained is not None:
        new, old = (json.loads(load(tokenizer).to_str()) for tokenizer in (folder, trained))
        if all(new[part] == old[part] for part in ("model", "normalizer", "pre_tokenizer")):
            return
    raise UserError.of("tokenizer.path", folder, f"is not the tokenizer that {source} was made with", fix)


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    """The ids of each text, without the special tokens of the post-processor."""
    encodings = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    return np.fromiter(chain.from_iterable(encodings), np.uint32, lengths.sum()), lengths


def without_pieces(tokenizer: Tokenizer, reserved: Iterable[int]) -> Tokenizer | None:
    """A Unigram tokenizer that never encodes text as the given entries; None for another kind of model.

    Stock transformers writes the control symbols of SentencePiece (`</s>`, `<mask>`) as entries of the model with the best score, 0: text
    that spells them is encoded as them. SentencePiece excludes them from its search. Here they get names that no text contains; their
    scores stay, on which that of an unknown character depends.
    """
    content = json.loads(tokenizer.to_str())
    if content["model"]["type"] != "Unigram":
        return None
    vocabulary, names = content["model"]["vocab"], set()
    for number in reserved:
        if number < len(vocabulary):
            names.add(vocabulary[number][0])
            vocabulary[number][0] = f"{_NO_TEXT}{number}"
    # The ids of added tokens are those of their entries, or follow the vocabulary in this order.
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in names]
    content["post_processor"] = None
    renamed = Tokenizer.from_str(json.dumps(content))
    renamed.encode_special_tokens = True
    return renamed


def affixes(tokenizer: Tokenizer) -> Affixes:
    """The special tokens that the post-processor puts before and after a text."""
    for text in ("a", "1", ".", "\n"):
        plain, whole = (tokenizer.encode(text, add_special_tokens=special).ids for special in (False, True))
        first = next((place for place in range(len(whole)) if whole[place : place + len(plain)] == plain), 0)
        if plain:
            return whole[:first], whole[first + len(plain) :]
    return whole, []


class PromptEncoder:
    """Encodes texts that are no documents, such as prompts; `spelled` counts, by special token, those that spell it."""

    def __init__(self, tokenizer: Tokenizer, around: Affixes | None = None, spelled: str = "text") -> None:
        """Keep a tokenizer of `load`, whose encode_special_tokens is set at each call.

        Args:
            around: TextEncoder.around; default: as the post-processor of the tokenizer does.
            spelled: tokenizer.spelled; text that spells a special token stays text also where it is an entry of a Unigram model.
        """
        self._tokenizer, self._around = tokenizer, affixes(tokenizer) if around is None else around
        special = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._reserved = set(special) - set(unknown_token(tokenizer))
        self._stays_text, self.spelled = spelled == "text", Counter[str]()
        self._plain = without_pieces(tokenizer, sorted(self._reserved)) if self._stays_text else None
        self._spelled = re.compile("|".join(re.escape(special[number]) for number in sorted(self._reserved)) or "(?!)")

    def encode(self, texts: Sequence[str], *, complete: bool = False) -> list[list[int]]:
        """The ids of each text; `complete` adds the special tokens around a text."""
        self._tokenizer.encode_special_tokens = self._stays_text
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        for number, text in enumerate(texts):
            self.spelled.update(set(self._spelled.findall(text)))
            if self._plain is not None and not self._reserved.isdisjoint(encoded[number]):
                encoded[number] = self._plain.encode(text, add_special_tokens=False).ids
        before, after = self._around if complete else ([], [])
        return [[*(before if ids[: len(before)] != before else []), *ids, *after] for ids in encoded]  # a prompt may spell them


def warn_of_spelled(where: str, spelled: Mapping[str, int]) -> None:
    """Warn of special tokens that texts spell, if any do: token -> number of texts."""
    if spelled:
        listed = ", ".join(f"{token} ({count:,})" for token, count in Counter(spelled).most_common(10))
        log.warning("%s: texts spell special tokens, and have their characters or the token as tokenizer.spelled says: %s", where, listed)


def special_token(folder: Path, name: str) -> str | None:
    """The text of bos_token or another special token in tokenizer_config.json; None if it names none."""
    path = folder / "tokenizer_config.json"
    token = json.loads(path.read_text(encoding="utf-8")).get(name) if path.is_file() else None
    return token["content"] if isinstance(token, dict) else token


def unknown_token(tokenizer: Tokenizer) -> list[int]:
    """The id of the unknown token, which is a special token that text may contain; empty if the tokenizer has none."""
    model = json.loads(tokenizer.to_str())["model"]
    token = model.get("unk_token")
    number = tokenizer.token_to_id(token) if token else model.get("unk_id")
    return [] if number is None else [number]


class TextEncoder:
    """Encodes text with the tokenizer of a Hugging Face folder.

    Text that spells a special token is encoded as ordinary text, so that a document cannot contain an end-of-document token.

    Its ids are the reference for other engines (pipeline/data/tokenize/encoders.py).

    Attributes:
        vocab_size: one more than the largest id.
        end_of_document: id of the token that is written after every document.
        bos: id of the token that is written before every document; None without one.
        around: ids of the tokens before and after a prompt, bos among them.
    """

    name = "huggingface"

    def __init__(self, folder: Path, end_of_document: str, bos: str = "auto", spelled: str = "text") -> None:
        """Load the tokenizer.

        Args:
            bos: tokenizer.bos; auto follows the post-processor.
            spelled: tokenizer.spelled.

        Raises:
            UserError: the tokenizer is missing or cannot be read, or lacks one of these special tokens.
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
        self._reserved = np.zeros(self.vocab_size, dtype=bool)
        self._reserved[[vocabulary[token] for token in self.special_tokens]] = True
        self._reserved[unknown_token(self._tokenizer)] = False
        if self.end_of_document in self.encode([end_of_document])[0].tolist():
            rule = f"is an ordinary token of {path}: a document whose text contains it would end there"
            raise UserError.of("tokenizer.end_of_document", end_of_document, rule, "choose one of its special tokens")
        self.around, self.bos = self._begun(bos)
        self.spelled = spelled

    @classmethod
    def of(cls, config: TokenizerConfig) -> Self:
        """Load the tokenizer of a configuration; raises as the constructor."""
        return cls(Path(config.path), config.end_of_document, config.bos, config.spelled)

    @property
    def prompts(self) -> PromptEncoder:
        """A new encoder of prompts."""
        return PromptEncoder(load(self.path.parent), self.around, self.spelled)

    @property
    def settings(self) -> dict[str, Any]:
        """What manifests record of the encoding of prompts: nothing of keys as before there was a choice."""
        bos = {} if self.follows_tokenizer else {"tokenizer.bos": "none" if self.bos is None else "document"}
        spelled = {} if self.spelled == "text" else {"tokenizer.spelled": self.spelled}
        return {"tokenizer.path": self.fingerprint, **bos, **spelled}

    def _begun(self, choice: str) -> tuple[Affixes, int | None]:
        """Return `around` and `bos`. What an encoder has around a text ([CLS] and [SEP]) is no token of the documents."""
        before, after = affixes(self._tokenizer)
        encoder = special_token(self.path.parent, "mask_token") is not None
        natural = before[0] if len(before) == 1 and before != [self.end_of_document] and (not after or not encoder) else None
        if natural is not None and after == [self.end_of_document]:
            after = []  # it follows a document anyway, and no prompt
        if choice == "auto" and natural is None and before and not encoder:
            log.warning(
                "tokenizer.bos=auto: documents begin without what the tokenizer writes before a text (ids %s): a BOS is one token, and "
                "not tokenizer.end_of_document",
                before,
            )
        if choice == "auto" or (choice == "none" and natural is None):
            return (before, after), natural
        if choice == "none":
            return ([], []), None
        token = next(iter(before), None) if natural is None else natural
        token = self.first_of([named]) if token is None and (named := special_token(self.path.parent, "bos_token")) else token
        if token in (None, self.end_of_document):
            rule = f"needs a token that begins a text, and {self.path.parent} names none but tokenizer.end_of_document"
            raise UserError.of("tokenizer.bos", choice, rule, "name one as bos_token in its tokenizer_config.json, or set it to none")
        assert token is not None
        return ([token, *(number for number in before if number != token)], after), token

    @property
    def follows_tokenizer(self) -> bool:
        """Whether the tokens around a prompt are those of the post-processor."""
        return self.around == affixes(self._tokenizer)

    @property
    def totals(self) -> dict[str, Any]:
        """What manifests of tokens record of the tokenizer."""
        counts = {"vocab_size": self.vocab_size, "end_of_document": self.end_of_document, "bos": self.bos}
        return {**counts, "tokenizer": self.fingerprint}

    def first_of(self, tokens: Iterable[str]) -> int | None:
        """The id of the first of `tokens` that is a special token of the tokenizer; None if none is."""
        return next((self._tokenizer.token_to_id(token) for token in tokens if token in self.special_tokens), None)

    @property
    def dtype(self) -> np.dtype:
        """The smallest little-endian unsigned integer type that can represent every id: uint16 or uint32."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text, without the special tokens of the post-processor."""
        ids, lengths = encode(self._tokenizer, texts)
        if not (hits := np.flatnonzero(self._reserved[ids])).size or self._plain is None:
            return ids, lengths
        documents = np.unique(np.searchsorted(np.cumsum(lengths), hits, side="right"))
        again, again_lengths = encode(self._plain, [texts[document] for document in documents])
        parts, new = np.split(ids, np.cumsum(lengths)[:-1]), np.split(again, np.cumsum(again_lengths)[:-1])
        for document, part in zip(documents.tolist(), new, strict=True):
            parts[document] = part
        lengths[documents] = again_lengths
        return np.concatenate(parts), lengths

    @cached_property
    def _plain(self) -> Tokenizer | None:
        """Encodes the texts that spell special tokens and would be encoded as them; None if the model has no such entries."""
        return without_pieces(self._tokenizer, np.flatnonzero(self._reserved).tolist())
