"""Steps that filter by source, license and address, by fields, and by overlap with benchmarks."""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import xxhash

from pipeline.common.condition import Condition
from pipeline.common.errors import UserError
from pipeline.config.cleaning import AllowStep, ContaminationStep, FieldsStep
from pipeline.data.clean.document_batch import DocumentBatch, Step, Verdict, drop
from pipeline.data.read import documents
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.input_files import InputFile, Span
from pipeline.data.read.reader import read
from pipeline.data.words import IDEOGRAPH, Lookup, Words, ngrams

_SPDX = re.compile(r"SPDX-License-Identifier:\s*([\w.+() -]*[\w+)])")
_SPDX_CHARACTERS = 2000
_NO_HASHES = np.zeros(0, dtype=np.uint64)


def allow(knobs: AllowStep) -> Step:
    """Drop documents whose source or license matches no pattern of its list, where there is one; those of blocked addresses; reserved ones.

    A license that only the text states becomes metadata, which `stage=ledger` counts (https://spdx.dev/learn/handling-license-info).

    Raises:
        UserError: a file of addresses cannot be read, or has a line that is no address.
    """
    addresses = _Addresses(knobs.blocked)

    def matches(value: object, patterns: list[str]) -> bool:
        return not patterns or any(fnmatch.fnmatchcase(str(value).lower(), pattern.lower()) for pattern in patterns)

    def source(document: Document) -> object:
        return document.meta.get(knobs.source_field, document.source)

    def licensed(document: Document) -> bool:
        licence = document.meta.get(knobs.licence_field)
        if not licence and (tag := _SPDX.search(document.text, 0, _SPDX_CHARACTERS)):
            licence = document.meta[knobs.licence_field] = tag[1]
        text = str(licence or "").strip("()")
        alternatives = [text] if re.search("[()]", text) else re.split(r"\s+OR\s+", text)  # nested: each license must be allowed
        return any(all(matches(part.strip("( )"), knobs.licences) for part in re.split(r"\s+(?:AND|OR)\s+", one)) for one in alternatives)

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        sources = np.array([not matches(source(document), knobs.sources) for document in batch.documents])
        licences = np.array([not licensed(document) for document in batch.documents])
        blocked = addresses.contain([document.meta.get(knobs.url_field) for document in batch.documents])
        reserved = np.array([not knobs.reserved and bool(document.meta.get("reserved")) for document in batch.documents])
        verdicts = [(sources, "source not allowed"), (licences, "license not allowed"), (blocked, "blocked address")]
        return drop(batch, [*verdicts, (reserved, "rights reserved")])

    if knobs.blocked:
        step.notes = {"addresses": addresses.count}  # type: ignore[attr-defined] # for the report
    return step


class _Addresses:
    """The addresses of files, each with what is below it: of a domain its subdomains, of a URL those that go on after /, ? or #.

    They are kept as hashes of 8 bytes: a million of them take 8 MB.
    """

    def __init__(self, files: list[str]) -> None:
        hashes = [np.fromiter((_hash(text) for text in _lines(name)), dtype=np.uint64) for name in files]
        self._known = Lookup(np.concatenate(hashes)) if hashes else None
        self.count = sum(map(len, hashes))

    def contain(self, urls: list[object]) -> np.ndarray:
        """Return which URLs are at an address or below it."""
        contained = np.zeros(len(urls), dtype=bool)
        if self._known is not None and len(self._known.known):
            pairs = [(index, _hash(part)) for index, url in enumerate(urls) if url for part in _above(str(url))]
            owners, hashes = np.array(pairs, dtype=np.uint64).reshape(-1, 2).T
            contained[owners[self._known.find(hashes)[0]].astype(np.int64)] = True
        return contained


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _above(url: str) -> Iterator[str]:
    """Yield a URL and everything above it: domains, and beginnings that end before /, ? or #."""
    host, path = _address(url)
    labels = host.split(".")
    yield from (".".join(labels[first:]) for first in range(len(labels)))
    ends = {*(match.start() for match in re.finditer("[/?#]", path) if match.start()), len(path)}
    yield from (f"{name}{path[:end]}" for name in {host, host.removeprefix("www.")} for end in ends)


def _address(url: str) -> tuple[str, str]:
    """The host of a URL, in ASCII and small letters, and its path without the slash at its end."""
    rest = re.sub(r"^(\w[\w+.-]*:)?//", "", url.strip())
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    path = rest[len(host) :]
    host = re.sub(r"(?<=[\w.\]]):\d*$", "", host.rpartition("@")[2]).strip(".").lower()
    if host.startswith("["):
        with contextlib.suppress(ValueError):
            host = f"[{ipaddress.ip_address(host.strip('[]')).compressed}]"
    labels = [
        label if label.isascii() else f"xn--{unicodedata.normalize('NFC', label).encode('punycode').decode()}" for label in host.split(".")
    ]
    return ".".join(labels), unquote(path).rstrip("/")


def _lines(name: str) -> Iterator[str]:
    """Yield the addresses of a file: not empty lines, nor what follows a # at the beginning or after a space."""
    key, fix = "clean.allow.blocked", "write one domain or URL a line, such as example.org or example.org/private"
    try:
        with open(Path(name).expanduser(), encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                text = re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("*.")
                if text and (re.search(r"\s", text) or not re.fullmatch(r"[\w.-]+|\[[\da-f:.]+\]", _address(text)[0])):
                    raise UserError.of(key, name, f"line {number} is no address: {text[:80]!r}", fix)
                if text:
                    yield "".join(_address(text))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError.of(key, name, f"cannot be read: {error}", "name a text file in UTF-8 that exists") from error


def fields(knobs: FieldsStep) -> Step:
    """Drop documents whose fields do not meet a condition; also those without a field that is compared."""
    condition = Condition(knobs.keep)

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        alive = np.flatnonzero(batch.alive).tolist()
        for index, label in zip(alive, batch.labels(alive), strict=True):
            record = documents.metadata(batch.documents[index], label, score=float(batch.scores[index]))
            if fault := condition.fault(documents.fields(record)):
                yield Verdict(index, fault)

    return step


class Contamination:
    """Drop documents that share `words` consecutive words with a benchmark (13 in Brown et al. 2020, appendix C).

    An item with fewer words is matched as a whole, if it has at least `least_words` (8 in that appendix).

    Attributes:
        notes: numbers for the report: items, those matched as a whole, and those that are too short to be matched.

    Raises:
        UserError: a file is missing or unreadable, or no item is long enough.
    """

    def __init__(self, knobs: ContaminationStep) -> None:
        self._words, self._least = knobs.words, knobs.least_words
        grams, begins, items, short = [_NO_HASHES], [_NO_HASHES], 0, 0
        self._whole: set[bytes] = set()
        for items, text in enumerate(_benchmark_texts(knobs.files), start=1):  # noqa: B007 - read after the loop
            words = Words([text])
            grams.append(_word_ngrams(words, self._words)[0])
            whole = _inner_words(words)
            if self._least <= len(whole) < self._words:
                self._whole.add(whole.tobytes())
                begins.append(ngrams(whole[: self._least], self._least))
            elif not len(grams[-1]):
                short += 1
        self._lengths = sorted({len(whole) // _NO_HASHES.itemsize for whole in self._whole})
        self._grams, self._begins = Lookup(np.concatenate(grams)), Lookup(np.concatenate(begins))
        self.notes = {
            "items": items,
            "items matched as a whole": len(begins) - 1,
            f"items of fewer than {self._least} words, ignored": short,
        }
        if items == short:
            rule = f"contain no text of {self._least} words"
            fix = "specify the benchmark files, or remove the step from clean.steps"
            raise UserError.of("clean.contamination.files", knobs.files, rule, fix)

    def __call__(self, batch: DocumentBatch) -> Iterable[Verdict]:
        """Yield the verdicts on a batch."""
        hits = np.concatenate([_found(batch.words, self._words, self._grams), self._whole_items(batch.words)])
        return drop(batch, [(np.bincount(batch.words.spans.texts[hits], minlength=len(batch.texts)) > 0, "overlaps a benchmark")])

    def _whole_items(self, words: Words) -> np.ndarray:
        """The first words of the items that are matched as a whole."""
        hashes, texts = words.hashes, words.spans.texts
        return np.array(
            [
                start
                for start in _found(words, self._least, self._begins).tolist()
                for end in (start + length for length in self._lengths)
                if end <= len(texts) and texts[end - 1] == texts[start] and hashes[start:end].tobytes() in self._whole
            ],
            dtype=np.int64,
        )


def _found(words: Words, length: int, known: Lookup) -> np.ndarray:
    """The first words of the n-grams that are known."""
    if not len(known.known):
        return np.zeros(0, dtype=np.int64)
    hashes, starts = _word_ngrams(words, length)
    return starts[known.find(hashes)[0]]


def _inner_words(words: Words) -> np.ndarray:
    """The hashes of the words that are the same within another text: in scripts without spaces, neighbors change the first and the last."""
    spans = words.spans
    if not len(spans):
        return _NO_HASHES
    first, last = words.kinds[[spans.starts[0], spans.ends[-1] - 1]] & IDEOGRAPH != 0
    return words.hashes[int(first) : len(spans) - int(last)]


def _word_ngrams(words: Words, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (hash, first word) of every n-gram of words within a text."""
    hashes = ngrams(words.hashes, length)
    starts = np.arange(len(hashes))
    texts = words.spans.texts
    inside = texts[: len(hashes)] == texts[length - 1 :][: len(hashes)]
    return hashes[inside], starts[inside]


def _benchmark_texts(files: list[str]) -> Iterable[str]:
    for name in files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError.of("clean.contamination.files", name, "no such file", "correct the path, or remove it")
        source = InputFile(str(path), path.name, path.stat().st_size)
        for document in read(Span(source), ReadOptions()):
            if isinstance(document, Bad):
                raise UserError.of("clean.contamination.files", path, f"{document.position}: {document.reason}", "repair the file")
            if isinstance(document, Document):
                yield document.text
