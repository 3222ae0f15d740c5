"""The input files, their division into parts that ranks read, and fingerprints that tell whether they are those that a run has read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import xxhash

from pipeline.common.errors import UserError, Violation
from pipeline.common.mpi import Comm, balanced
from pipeline.common.remote import is_remote
from pipeline.data.read import file_search
from pipeline.data.read import suffixes as file_suffixes
from pipeline.data.read.documents import DEFAULT_CORPUS, Bad, add_in_group, key_of, label
from pipeline.data.read.streams import Section

_SPLITTABLE = ("lines", "json_values", "parquet")
_OPENING_BYTES = 4096  # opening a file costs about as much as reading this
BLOCKS, BLOCK_BYTES = 8, 1 << 14
"""The content of a file is sampled in this many blocks, evenly spaced from its first to its last byte: files up to 128 kB in full."""
_THREADS = 8
"""Concurrent reads of a rank: a parallel file system has a high latency per file, but serves many files in parallel."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file.

    Attributes:
        path: local path or URL.
        name: path relative to the input that contains it, JSON-safe; with an offset it identifies a document independently of the
            location of the corpus.
        size: size as stored, in bytes.
        version: changes when the file is written; see file_search.FoundFile.
    """

    path: str
    name: str
    size: int
    corpus: str = DEFAULT_CORPUS
    version: str = ""

    @property
    def label(self) -> str:
        """Its name, prefixed with its corpus unless that is the default one."""
        return label(self.corpus, self.name)

    @property
    def splittable(self) -> bool:
        """Whether it can be read in byte ranges."""
        return file_suffixes.file_format(self.name) in _SPLITTABLE and not file_suffixes.split_compression(self.name)[1]

    @property
    def expansion(self) -> int:
        """Approximate bytes of text per stored byte."""
        compressed = file_suffixes.split_compression(self.name)[1] or file_suffixes.has_suffix(self.name, file_suffixes.INTERNAL)
        return file_suffixes.EXPANSION if compressed else 1


@dataclass(frozen=True, slots=True)
class Span:
    """The lines of a file, or the row groups of a Parquet file, that begin at start <= offset < end; end None is the end of the file.

    Of a compressed file, which has one span, a reader reads one section at a time. With `verify`, a reader knows the file before it returns
    documents.
    """

    file: InputFile
    start: int = 0
    end: int | None = None
    section: Section | None = None
    verify: bool = False

    @property
    def size(self) -> int:
        """Bytes to read."""
        return (self.file.size if self.end is None else self.end) - self.start

    @property
    def cost(self) -> int:
        """Estimated cost of reading it, in bytes of plain text."""
        return self.size * self.file.expansion + _OPENING_BYTES


@dataclass(frozen=True, slots=True)
class InputPart:
    """A unit of work: consecutive spans in the order of the sources; its number is independent of the number of ranks."""

    number: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(span.size for span in self.spans)

    @property
    def cost(self) -> int:
        """Estimated cost of reading it, in bytes of plain text."""
        return sum(span.cost for span in self.spans)


def part_bytes(sources: Sequence[InputFile], megabytes: float | None) -> int:
    """The size of a part in bytes: as configured, or else a thousandth of the input, from 4 to 256 MB; independent of the ranks."""
    if megabytes is not None:
        return round(megabytes * 1e6)
    return min(max(sum(source.size for source in sources) // 1000, 4_000_000), 256_000_000)


def parts(sources: Sequence[InputFile], part_bytes: int) -> list[InputPart]:
    """Divide the input into parts of about `part_bytes`, independent of the number of ranks: small files are grouped, large ones split."""
    divided: list[InputPart] = []
    spans: list[Span] = []
    filled = 0
    for span in itertools.chain.from_iterable(_spans(source, part_bytes) for source in sources):
        weight = span.size + _OPENING_BYTES
        if spans and filled + weight > part_bytes + _OPENING_BYTES:
            divided.append(InputPart(len(divided), tuple(spans)))
            spans, filled = [], 0
        spans.append(span)
        filled += weight
    return [*divided, InputPart(len(divided), tuple(spans))] if spans else divided


def _spans(source: InputFile, part_bytes: int) -> list[Span]:
    """The spans of a file: one, or byte ranges if the file is large and splittable."""
    if not source.splittable or source.size <= part_bytes:
        return [Span(source)]
    return [Span(source, start, min(start + part_bytes, source.size)) for start in range(0, source.size, part_bytes)]


def assigned(parts: Sequence[InputPart], rank: int, size: int) -> list[InputPart]:
    """The parts that one of `size` ranks reads, the most costly one first."""
    return [parts[number] for number in balanced([part.cost for part in parts], rank, size)]


@dataclass
class Listing:
    """What was found in the input.

    Attributes:
        files: the files to read, the default corpus first, each corpus sorted by name.
        bad: broken links, unreadable files, folders without documents.
        skipped: corpus -> reason -> [files and folders, bytes] that are not read.
    """

    files: list[InputFile] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    skipped: dict[str, dict[str, list[int]]] = field(default_factory=dict)


def find(corpora: Mapping[str, Sequence[str]], suffixes: Sequence[str], exclude: Sequence[str]) -> Listing:
    """Find the files of `data.input` and `data.corpora`.

    Args:
        corpora: name of a corpus -> its files, folders (searched recursively), globs and URLs.
        suffixes: file name suffixes of documents; empty selects all supported formats.
        exclude: globs on single path components; a file or folder below a searched folder that matches one is skipped.

    Raises:
        UserError: no input is given or found, an input does not exist, or two files have the same name. All problems in one error.
    """
    if not any(corpora.values()):
        raise UserError.of("data.input", "[]", "names no documents", "specify files, globs or folders: data.input=[corpus/*.jsonl]")
    listing = Listing()
    violations: list[Violation] = []
    for corpus in sorted(corpora, key=lambda name: (name != DEFAULT_CORPUS, name)):
        try:
            listing.files += _corpus(corpus, key_of(corpus), corpora[corpus], tuple(suffixes) or file_suffixes.SEARCHED, exclude, listing)
        except UserError as error:
            violations += error.violations
    if not listing.files and not violations:
        violations = [Violation("data.input", at.source, at.reason, "specify other files, or other data.suffixes") for at in listing.bad]
    UserError.raise_for(violations)
    return listing


def _corpus(
    corpus: str, key: str, inputs: Sequence[str], suffixes: tuple[str, ...], exclude: Sequence[str], listing: Listing
) -> list[InputFile]:
    """The files of one corpus, sorted by name; what is unreadable or not read is added to the listing."""
    violations: list[Violation] = []
    by_name: dict[str, InputFile] = {}
    seen: set[str] = set()  # a file that is found twice is read once
    for given in itertools.chain.from_iterable(map(file_search.expand_numbers, inputs)):
        matched = False
        try:
            for entry in file_search.search(given, exclude):
                if entry.skipped:
                    add_in_group(listing.skipped, corpus, entry.skipped, 1, entry.size)
                    continue
                if not file_suffixes.has_suffix(entry.name, suffixes) and not entry.folder:
                    add_in_group(listing.skipped, corpus, file_suffixes.UNREAD + file_suffixes.of_name(entry.name), 1, entry.size)
                    continue
                matched = True
                if entry.problem:
                    listing.bad.append(Bad(label(corpus, entry.name), "", entry.problem, entry.size))
                elif entry.real in seen:
                    add_in_group(listing.skipped, corpus, file_search.AGAIN, 1, entry.size)
                else:
                    seen.add(entry.real)
                    source = InputFile(entry.path, entry.name, entry.size, corpus, entry.version)
                    if by_name.setdefault(entry.name, source) is not source:
                        rule = f"has the same name {entry.name} relative to its input as {by_name[entry.name].path}"
                        violations.append(Violation(key, entry.path, rule, "specify their common parent folder as one input"))
        except file_search.InputPathError as error:
            violations.append(Violation(key, given, str(error), error.fix))
            continue
        if not matched and file_search.is_folder(given):
            reason = f"contains no file with suffix {file_suffixes.described(suffixes)}"
            listing.bad.append(Bad(label(corpus, file_search.printable(given)), "", reason))
        elif not matched:
            rule = f"does not have the suffix {file_suffixes.described(suffixes)}"
            violations.append(Violation(key, given, rule, "specify other data.suffixes, or other files"))
    UserError.raise_for(violations)
    return [by_name[name] for name in sorted(by_name)]


def content(comm: Comm, sources: Sequence[InputFile]) -> str:
    """Summarize the corpora, names, sizes and sampled contents of the files; independent of their location and times. Collective.

    A remote file is represented by its version instead of its content.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        mine = list(pool.map(_sample, sources[comm.rank :: comm.size]))
    samples: list[str] = [""] * len(sources)
    for rank, rank_samples in enumerate(comm.allgather(mine)):
        samples[rank :: comm.size] = rank_samples
    state = xxhash.xxh3_64()
    for source, sample in zip(sources, samples, strict=True):
        state.update(f"{source.label}\0{source.size}\0{sample}\0".encode())
    return f"{len(sources)} files, {sum(source.size for source in sources)} bytes, xxh3 {state.hexdigest()}"


def versions(sources: Sequence[InputFile]) -> dict[str, str]:
    """Describe the size and the version of every file: an edit that the sample of the content misses changes its modification time.

    Returns:
        "data.input/NAME" -> description.
    """
    return {f"data.input/{source.label}": f"{source.size} bytes, {source.version or 'of unknown version'}" for source in sources}


def _sample(source: InputFile) -> str:
    """The checksum of evenly spaced blocks of a file; its version if it is remote, its error if it cannot be read."""
    if is_remote(source.path):
        return source.version
    state = xxhash.xxh3_64()
    last = max(0, source.size - BLOCK_BYTES)
    try:
        with open(source.path, "rb", buffering=0) as handle:
            for place in sorted({last * block // (BLOCKS - 1) for block in range(BLOCKS)}):
                handle.seek(place)
                state.update(handle.read(BLOCK_BYTES))
    except OSError as error:
        return str(error.strerror)
    return state.hexdigest()
