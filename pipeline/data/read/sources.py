"""Which files the documents come from, and how several ranks share the reading of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from pipeline.data.read import places
from pipeline.data.read import suffixes as forms
from pipeline.data.read.documents import DEFAULT_CORPUS, Bad, label
from pipeline.errors import UserError, Violation

_CUT = ("lines", "parquet")
_OPENING_BYTES = 4096  # opening a file costs about as much as reading this


@dataclass(frozen=True, slots=True)
class Source:
    """One input file.

    Attributes:
        path: where it lies; a URL for a remote file.
        name: its path relative to the input it was found under, JSON-safe; with an offset it identifies a document wherever the
            corpus is moved.
        size: bytes as stored.
        corpus: the corpus it belongs to.
    """

    path: str
    name: str
    size: int
    corpus: str = DEFAULT_CORPUS

    @property
    def label(self) -> str:
        """Its name among all corpora."""
        return label(self.corpus, self.name)

    @property
    def cut(self) -> bool:
        """Whether several ranks can read it."""
        return forms.form(self.name) in _CUT and not forms.split_compression(self.name)[1]

    @property
    def expansion(self) -> int:
        """Bytes of text per byte, about."""
        return forms.EXPANSION if forms.split_compression(self.name)[1] or forms.form(self.name) == "parquet" else 1


@dataclass(frozen=True, slots=True)
class Span:
    """The lines, or for Parquet the row groups, of a file that begin in its bytes start <= offset < end; end None is all the rest."""

    source: Source
    start: int = 0
    end: int | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of its file."""
        return self.start == 0 and self.end is None

    @property
    def size(self) -> int:
        """Bytes to read."""
        return (self.source.size if self.end is None else self.end) - self.start

    @property
    def cost(self) -> int:
        """What reading it costs, in bytes of plain text, about."""
        return self.size * self.source.expansion + _OPENING_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """A unit of work: spans one after another in the order of the sources.

    Attributes:
        number: its place in that order, the same on any number of ranks.
        spans: what it consists of.
    """

    number: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(span.size for span in self.spans)

    @property
    def cost(self) -> int:
        """What reading it costs, in bytes of plain text, about."""
        return sum(span.cost for span in self.spans)


def part_bytes(sources: Sequence[Source], megabytes: float | None) -> int:
    """The size of a part: as asked for, or else a thousandth of the input, from 4 to 256 MB. Nothing of it depends on the ranks."""
    if megabytes is not None:
        return round(megabytes * 1e6)
    return min(max(sum(source.size for source in sources) // 1000, 4_000_000), 256_000_000)


def parts(sources: Sequence[Source], part_bytes: int) -> list[Part]:
    """All of the input in units of about `part_bytes`, whatever the number of ranks: many small files in one, large ones cut."""
    found: list[Part] = []
    spans: list[Span] = []
    filled = 0
    for span in itertools.chain.from_iterable(_spans(source, part_bytes) for source in sources):
        weight = span.size + _OPENING_BYTES
        if spans and filled + weight > part_bytes + _OPENING_BYTES:
            found.append(Part(len(found), tuple(spans)))
            spans, filled = [], 0
        spans.append(span)
        filled += weight
    return [*found, Part(len(found), tuple(spans))] if spans else found


def _spans(source: Source, part_bytes: int) -> list[Span]:
    """A file whole, or in ranges if it is large and its form allows."""
    if not source.cut or source.size <= part_bytes:
        return [Span(source)]
    return [Span(source, start, min(start + part_bytes, source.size)) for start in range(0, source.size, part_bytes)]


def share(parts: Sequence[Part], rank: int, size: int) -> list[Part]:
    """The parts that one of `size` ranks reads, balanced by their cost: the dearest first, each to the rank that has least."""
    loads = [(0, r) for r in range(size)]
    mine = []
    for cost, number in sorted((-part.cost, number) for number, part in enumerate(parts)):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load - cost, owner))
        if owner == rank:
            mine.append(parts[number])
    return mine


def fingerprint(sources: Sequence[Source]) -> str:
    """The files' corpora, names and sizes as a short text: equal for the same input, wherever it lies."""
    state = xxhash.xxh3_64()
    for source in sources:
        state.update(f"{source.label}\0{source.size}\0".encode())
    return f"{len(sources)} files, {sum(s.size for s in sources)} bytes, xxh3 {state.hexdigest()}"


def find(corpora: Mapping[str, Sequence[str]], suffixes: Sequence[str], exclude: Sequence[str]) -> tuple[list[Source], list[Bad]]:
    """The files behind `data.input` and `data.corpora`, and what was met on the way that cannot be one.

    Args:
        corpora: name of a corpus -> its files, folders (searched to any depth), globs and URLs.
        suffixes: endings of the names that count as documents; none for every form that can be read.
        exclude: globs on single names; a file or folder below a searched folder that matches one is left out.

    Returns:
        The files, the default corpus first, each corpus sorted by name; and broken links, unreadable files, folders without documents.

    Raises:
        UserError: nothing is named or found, an input does not exist, or two files have one name. All of it at once.
    """
    if not any(corpora.values()):
        raise UserError.of("data.input", "[]", "names no documents", "give files, globs or folders: data.input=[corpus/*.jsonl]")
    found: list[Source] = []
    bad: list[Bad] = []
    violations: list[Violation] = []
    for corpus in sorted(corpora, key=lambda name: (name != DEFAULT_CORPUS, name)):
        key = "data.input" if corpus == DEFAULT_CORPUS else f"data.corpora.{corpus}"
        try:
            found += _corpus(corpus, key, corpora[corpus], tuple(suffixes) or forms.SEARCHED, exclude, bad)
        except UserError as error:
            violations += error.violations
    if not found and not violations:
        violations = [Violation("data.input", at.source, at.reason, "name other files, or other endings in data.suffixes") for at in bad]
    if violations:
        raise UserError(violations)
    return found, bad


def _corpus(
    corpus: str, key: str, inputs: Sequence[str], suffixes: tuple[str, ...], exclude: Sequence[str], bad: list[Bad]
) -> list[Source]:
    """The files of one corpus, sorted by name; what cannot be read is added to `bad`."""
    violations: list[Violation] = []
    by_name: dict[str, Source] = {}
    seen: set[str] = set()  # a file found twice is read once
    for given in inputs:
        matched = False
        try:
            for entry in places.search(given, exclude):
                if not entry.name.endswith(suffixes) and not entry.folder:
                    continue
                matched = True
                if entry.problem:
                    bad.append(Bad(label(corpus, entry.name), "", entry.problem))
                elif entry.real not in seen:
                    seen.add(entry.real)
                    source = Source(entry.path, entry.name, entry.size, corpus)
                    if by_name.setdefault(entry.name, source) is not source:
                        rule = f"is named {entry.name} within its input, and so is {by_name[entry.name].path}"
                        violations.append(Violation(key, entry.path, rule, "give their common parent folder as one input"))
        except places.NoPlaceError as error:
            violations.append(Violation(key, given, str(error), error.fix))
            continue
        if not matched and places.is_folder(given):
            bad.append(Bad(label(corpus, places.printable(given)), "", f"holds no file ending in {', '.join(suffixes)}"))
        elif not matched:
            rule = f"does not end in {', '.join(suffixes)}"
            violations.append(Violation(key, given, rule, "name other endings in data.suffixes, or other files"))
    if violations:
        raise UserError(violations)
    return [by_name[name] for name in sorted(by_name)]
