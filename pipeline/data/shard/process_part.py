"""Processes one part of the input: read, clean, compute signatures, write a sorted spill. Parts are independent of each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.common.atomic_files import atomic_file
from pipeline.config.data import DedupConfig
from pipeline.data.clean.cleaner import Cleaner, StepCounts
from pipeline.data.clean.document_batch import DocumentBatch, batches
from pipeline.data.dedup import exact, minhash
from pipeline.data.read.documents import (
    Bad,
    Document,
    ReadOptions,
    Skipped,
    Unchecked,
    add_count,
    add_counts,
    add_in_group,
    metadata,
    utf8,
    utf8_length,
)
from pipeline.data.read.input_files import InputPart
from pipeline.data.read.reader import read
from pipeline.data.read.streams import CheckError
from pipeline.data.shard import dropped
from pipeline.data.shard.shuffle import Order
from pipeline.data.shard.spill import SUFFIX, Spill, row_type
from pipeline.data.shard.spilled_documents import permutations

KEPT = "kept"
"""Among the reasons of PartCounts.languages: what cleaning keeps."""


@dataclass
class PartCounts:
    """The counts of one part, or the sum over parts.

    Attributes:
        documents, bytes: non-empty documents that were read.
        empty: documents without text.
        unchecked: compressed files without a check.
        bad: [file, position, reason, lost bytes] of unreadable input.
        skipped: corpus -> reason -> [number, bytes] of files, and parts of files, that are no documents and are not read.
        read: corpus -> [documents, bytes].
        lost: corpus -> step and reason -> [documents, bytes] that cleaning dropped.
        languages: language -> "kept", or step and reason -> [documents, bytes] that cleaning kept or dropped.
        notes: step -> what the report tells of its inputs -> number; the same for every part.
        runs: bounds of the sorted runs in the spill.
        index: offset of the index in the spill.
    """

    documents: int = 0
    bytes: int = 0
    empty: int = 0
    unchecked: int = 0
    bad: list[list[Any]] = field(default_factory=list)
    skipped: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    read: dict[str, list[int]] = field(default_factory=dict)
    steps: dict[str, StepCounts] = field(default_factory=dict)
    lost: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    languages: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    notes: dict[str, dict[str, int]] = field(default_factory=dict)
    runs: list[int] = field(default_factory=list)
    index: int = 0

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for the completion record of the part."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, encoded: dict[str, Any]) -> PartCounts:
        """Restore the counts from the result of `to_json`."""
        return cls(**{**encoded, "steps": {name: StepCounts(**counts) for name, counts in encoded["steps"].items()}})

    def add(self, other: PartCounts) -> None:
        """Add the counts of another part."""
        self.documents += other.documents
        self.bytes += other.bytes
        self.empty += other.empty
        self.unchecked += other.unchecked
        self.bad += other.bad
        add_counts(self.read, other.read)
        self.notes |= other.notes
        for mine, others in ((self.lost, other.lost), (self.languages, other.languages), (self.skipped, other.skipped)):
            for corpus_or_language, reasons in others.items():
                add_counts(mine.setdefault(corpus_or_language, {}), reasons)
        for name, counts in other.steps.items():
            self.steps.setdefault(name, StepCounts()).add(counts)


def listed(bad: Bad) -> list[Any]:
    """The entry of PartCounts.bad."""
    return [bad.source, bad.position, bad.reason, bad.lost_bytes]


def process(
    part: InputPart,
    stem: Path,
    options: ReadOptions,
    cleaner: Cleaner,
    order: Order,
    dedup: DedupConfig,
    advance: Callable[[int], None],
    *,
    save_dropped: bool = False,
    verify: bool = False,
) -> PartCounts:
    """Read and clean one part, and spill the documents that are kept.

    A compressed file has its checks behind its documents. If one fails, the part is taken back and read again, from verified files.

    Args:
        stem: path of the files of the part, without suffixes.
        advance: called with the number of input bytes that have been processed.
    """
    counts, rows = PartCounts(notes=cleaner.notes), row_type(permutations(dedup))
    try:
        with (
            atomic_file(stem.with_suffix(SUFFIX)) as handle,
            dropped.writer(stem.with_suffix(dropped.BY_CLEANING)) if save_dropped else nullcontext() as add,
        ):
            spill = Spill(handle, rows, dedup.bands if dedup.near else 0)

            def save(document: Document, step: str, reason: str, text: str, language: str) -> None:
                for groups, group in ((counts.lost, document.corpus), (counts.languages, language)):
                    add_in_group(groups, group, f"{step}: {reason}", 1, utf8_length(text))
                if add:
                    add(metadata(document, language), step, reason, text)

            for batch in batches(_documents(part, options, counts, advance, verify)):
                _spill(cleaner.clean(batch, counts.steps, save), spill, rows, order, dedup, counts)
                del batch  # before the next one is read, which may be large too
            spill.close()
            counts.runs, counts.index = spill.runs, spill.index
        return counts
    except CheckError:
        if verify:
            raise
    return process(part, stem, options, cleaner, order, dedup, lambda _: None, save_dropped=save_dropped, verify=True)


def _documents(
    part: InputPart, options: ReadOptions, counts: PartCounts, advance: Callable[[int], None], verify: bool
) -> Iterator[Document]:
    """Yield the non-empty documents of the sample; count them, empty documents, unreadable input and what is not read."""
    for span in part.spans:
        corpus = span.file.corpus
        add_count(counts.read, corpus, 0, 0)  # also of a corpus without a document
        for document in read(span, options, verify=verify):
            if isinstance(document, Bad):
                counts.bad.append(listed(document))
            elif isinstance(document, Skipped):
                add_in_group(counts.skipped, corpus, document.reason, 1, document.size)
            elif isinstance(document, Unchecked):
                counts.unchecked += 1
            elif not document.text or document.text.isspace():
                counts.empty += 1
            elif options.sample == 1 or xxhash.xxh3_64_intdigest(utf8(document.id)) < options.sample * 2**64:
                add_count(counts.read, corpus, 1, utf8_length(document.text))
                yield document
            del document
        advance(span.size)
    counts.documents = sum(documents for documents, _ in counts.read.values())
    counts.bytes = sum(size for _, size in counts.read.values())


def _spill(batch: DocumentBatch, spill: Spill, kind: np.dtype, order: Order, dedup: DedupConfig, counts: PartCounts) -> None:
    """Spill a cleaned batch, with the rows that deduplication and the report require; count the languages that it keeps."""
    alive = np.flatnonzero(batch.alive).tolist()
    if not alive:
        return
    documents = [batch.documents[index] for index in alive]
    languages = batch.labels(alive)
    rows = np.zeros(len(alive), dtype=kind)
    rows["language"] = [language.encode() for language in languages]
    rows["length"], rows["score"] = [len(batch.texts[index]) for index in alive], batch.scores[alive]
    if dedup.url:
        # A document without a URL is unique: its identity replaces the URL.
        urls = (str(document.meta.get(dedup.url_field) or f"id:{document.id}") for document in documents)
        rows["url"] = exact.keys(map(exact.normal_url, urls))
    hashes = np.zeros((0, len(alive)), dtype=np.uint64)
    if dedup.near:
        signatures = minhash.signatures(*minhash.shingles(batch.words, dedup.shingle), dedup.permutations)
        hashes = minhash.all_band_hashes(signatures[alive], dedup.bands, dedup.rows)
        if permutations(dedup):
            rows["minhash"] = signatures[alive]
    keys = np.array([order.shuffle_key(document) for document in documents], dtype=np.uint64)
    records = [
        metadata(document, language, batch.tags[index], float(batch.scores[index]))
        for document, language, index in zip(documents, languages, alive, strict=True)
    ]
    encoded = [utf8(batch.texts[index]) for index in alive]
    rows["exact"] = exact.keys_of_bytes(encoded)
    for language, text in zip(languages, encoded, strict=True):
        add_in_group(counts.languages, language, KEPT, 1, len(text))
    spill.add(keys, records, encoded, rows, hashes)
