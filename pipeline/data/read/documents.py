"""The output of the readers: documents, records of unreadable input, and what is not read because it is no document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.data import DataConfig

DEFAULT_CORPUS = "default"
"""The corpus of the documents that `data.input` names."""

REASON_CHARACTERS = 300
"""Longest position and reason of unreadable input: a name in an archive and a message of a library have no limit of their own."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its origin.

    Attributes:
        source: name of the input file.
        offset: start of the document in the decompressed file, in bytes; for Parquet the row, counted from 0.
            (corpus, source, offset) identifies the document.
        text: the document; encodable as UTF-8.
        meta: the small fields of its record other than the text; plain JSON.
    """

    source: str
    offset: int
    text: str
    meta: dict[str, Any]
    corpus: str = DEFAULT_CORPUS

    @property
    def id(self) -> str:
        """The identity as a string."""
        return f"{label(self.corpus, self.source)}:{self.offset}"


def metadata(document: Document, language: str, tags: Sequence[str] = (), score: float = math.nan) -> dict[str, Any]:
    """Return the record of a document in a shard, with its identity first; tags and score only if there are any."""
    record = {"id": document.id, "corpus": document.corpus, "lang": language or None, "source": document.source, "meta": document.meta}
    return {**record, **({"clean": tags} if tags else {}), **({} if math.isnan(score) else {"score": float(f"{score:.4g}")})}


def fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a condition reads of a record in a shard: the fields of its input, and corpus, lang and score, as far as known."""
    known = {name: value for name, value in record.items() if name not in ("meta", "source") and value is not None}
    return {"source": record.get("source"), **(record.get("meta") or {}), **known}


@dataclass(frozen=True, slots=True)
class Bad:
    """Unreadable input, which is quarantined.

    Attributes:
        source: name of the input file, as in a document's identity.
        position: position in the file: "line 7", "byte 1234", "row 17", "member 3.txt"; empty when the entire file is bad.
        reason: the fault, phrased to follow the position.
        lost_bytes: stored bytes of the file that cannot be read because of damage; 0 if only this record is lost. The length of a file
            that ends early is unknown, and it is taken to be half of the original: it has lost as many bytes as it has.
    """

    source: str
    position: str
    reason: str
    lost_bytes: int = 0

    def __post_init__(self) -> None:
        """Cut the position and the reason."""
        for name in ("position", "reason"):
            text = getattr(self, name)
            if len(text) > REASON_CHARACTERS:
                object.__setattr__(self, name, f"{text[:REASON_CHARACTERS]}...")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A part of a file that is not read because it is no document, such as an image in a web archive.

    Attributes:
        reason: a short text, identical for every part of this kind.
        size: its bytes.
    """

    reason: str
    size: int


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A file was read whose compression has no check: damage may have changed its documents."""


@dataclass(frozen=True)
class ReadOptions:
    """Options of the readers.

    Attributes:
        text_field: field of a JSON record, or column of a Parquet file, that holds the text.
        document_bytes: a document whose size in the file exceeds this is bad.
        main_content: keep only the main content of a web page, without navigation, headers and footers.
        sample: fraction of the documents that are read, chosen by their identity.
    """

    text_field: str = "text"
    document_bytes: int = 16_000_000
    main_content: bool = True
    sample: float = 1.0

    @classmethod
    def of(cls, data: DataConfig) -> ReadOptions:
        """The options of a configuration."""
        return cls(data.text_field, round(data.document_megabytes * 1e6), data.main_content, data.sample)


def library_reason(error: Exception) -> str:
    """The message of a library up to the first colon, after which it may quote what it has read."""
    return str(error).partition(":")[0][:80] or type(error).__name__


_ENCODED = 1 << 18


def utf8_length(text: str) -> int:
    """Length of a text in UTF-8 bytes; an ASCII text, which Python flags as such, is not encoded, and a large one not at once."""
    if text.isascii():
        return len(text)
    return sum(len(text[start : start + _ENCODED].encode()) for start in range(0, len(text), _ENCODED))


def utf8(text: str) -> bytes | bytearray:
    """A text in UTF-8; for a large one that is not ASCII, Python takes up to four times the memory of the result."""
    if text.isascii() or len(text) < _ENCODED:
        return text.encode()
    encoded, end = bytearray(utf8_length(text)), 0
    for start in range(0, len(text), _ENCODED):
        piece = text[start : start + _ENCODED].encode()
        encoded[end : end + len(piece)] = piece
        end += len(piece)
    return encoded


def label(corpus: str, source: str) -> str:
    """The name of a file, prefixed with its corpus unless that is the default one."""
    return source if corpus == DEFAULT_CORPUS else f"{corpus}/{source}"


def key_of(corpus: str) -> str:
    """The configuration key that names the input of a corpus."""
    return "data.input" if corpus == DEFAULT_CORPUS else f"data.corpora.{corpus}"


Counts = dict[str, list[int]]
"""Name -> [number, bytes]: of documents, of files, of what is not read."""


def add_count(totals: Counts, name: str, number: int, size: int) -> None:
    """Add to the number and the bytes of a name."""
    total = totals.setdefault(name, [0, 0])
    total[:] = total[0] + number, total[1] + size


def add_in_group(groups: dict[str, Counts], group: str, name: str, number: int, size: int) -> None:
    """Add to the number and the bytes of a name in a group, such as a corpus."""
    add_count(groups.setdefault(group, {}), name, number, size)


def add_counts(totals: Counts, others: Counts) -> None:
    """Add the numbers and bytes of all names."""
    for name, (number, size) in others.items():
        add_count(totals, name, number, size)
