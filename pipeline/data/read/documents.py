"""What readers hand on: documents, and what could not become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.data import DataConfig

DEFAULT_CORPUS = "default"
"""The corpus of the documents that `data.input` names."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text and where it came from.

    Attributes:
        source: name of the input file.
        offset: where the document begins in that file, in bytes of what it decompresses to, or for Parquet the row, counted from 0;
            with `corpus` and `source` the document's identity.
        text: the document. It can be written as UTF-8.
        meta: the small fields of its record besides the text; plain JSON.
        corpus: name of the corpus it belongs to.
    """

    source: str
    offset: int
    text: str
    meta: dict[str, Any]
    corpus: str = DEFAULT_CORPUS

    @property
    def id(self) -> str:
        """The identity as one text."""
        return f"{label(self.corpus, self.source)}:{self.offset}"


@dataclass(frozen=True, slots=True)
class Bad:
    """Input that is left out.

    Attributes:
        source: name of the input file, as in a document's identity.
        position: where in it: "line 7", "byte 1234", "row 17", "member 3.txt"; empty where the file as a whole is bad.
        reason: what is wrong, to be read after the position.
    """

    source: str
    position: str
    reason: str


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents.

    Attributes:
        text_field: field of a JSON record, or column of a Parquet file, that holds the text.
        document_bytes: a document larger than this, as it stands in its file, is bad.
        main_content: keep of a web page its main content alone, not navigation, headers and footers.
    """

    text_field: str = "text"
    document_bytes: int = 16_000_000
    main_content: bool = True

    @classmethod
    def of(cls, data: DataConfig) -> ReadOptions:
        """The options that a configuration asks for."""
        return cls(data.text_field, round(data.document_megabytes * 1e6), data.main_content)


def utf8_length(text: str) -> int:
    """Bytes of a text in UTF-8. Of an ASCII text, which Python knows for one, without writing them."""
    return len(text) if text.isascii() else len(text.encode())


def label(corpus: str, source: str) -> str:
    """A file's name among all corpora."""
    return source if corpus == DEFAULT_CORPUS else f"{corpus}/{source}"
