"""What stage=shard opens, creates, reads, writes, sends and holds, from explicit counts of its passes; `counted_shard` counts a real run.

Counts are sums over the ranks unless they are named otherwise. The input is JSON lines, not compressed. The parts are those of the
stage's own plan (input_files.parts) on files of equal size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.common import mpi
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import distributed, duplicates, exact, spans
from pipeline.data.read import input_files
from pipeline.data.read.input_files import InputFile
from pipeline.data.read.streams import BUFFER_BYTES
from pipeline.data.shard import span_search, spill, sweep
from pipeline.data.shard.shuffle import Order
from pipeline.data.shard.spill import RUN_BYTES, row_type

MIB = 1 << 20

# bytes of rows that are sent: the documents of a band, a pair, a question and its answer on exact keys, a vertex and its label
BAND_ROW, PAIR_ROW = duplicates._BAND.itemsize, duplicates._PAIR.itemsize
KEY_ROW, BEST_ROW = exact._ROW.itemsize + 4, exact._BEST.itemsize
HEAD = spill._HEAD.size

# of dedup.spans: bytes of memory of a row that is compared; bytes that are sent of a question and its answer
ANCHOR, WINDOW = span_search.ANCHOR_BYTES, span_search.WINDOW_BYTES
ANCHOR_ROW, WINDOW_ROW = 9 + 4 + 1, spans.WINDOW.itemsize + 4 + 1

BASE = 118e6
"""Resident memory of a rank that has imported everything."""


@dataclass(frozen=True)
class Corpus:
    """The corpus and the settings that determine the counts. Totals over the corpus, not means.

    Attributes:
        input_bytes, files: the input.
        documents: that cleaning keeps, and `text` and `meta`, the bytes of their text and of their metadata records.
        exact, near: of these documents, the duplicates.
        dropped_text: bytes of text of the duplicates.
        pairs: candidate pairs whose texts are compared, `bucket_pairs` of all bands before repeated ones are removed.
        edges: of the graph of duplicates.
        texts, texts_bytes: texts that are read to compare pairs, and their bytes with metadata.
        fetched: texts of other ranks among these; None: a random share.
        searches: passes over the bands; more than one only if there are chains of near duplicates.
        decisions: rounds of a search until every document in a pair is kept or dropped: the longest chain of better documents.
        lookups: exchanges of labels until the components of the graph are found, which grows with the logarithm of the longest chain.
        note_bytes: completion record of a part.
        report_bytes: report.json and report.html; shown_bytes: the texts of which it has excerpts.
        shard_bytes, part_bytes: as configured; part_bytes None is the default.
        sizes: of the files; default: all are equal.
        anchors, windows, cuts: of dedup.spans: rows that are compared, and spans that are cut; asked: bytes of the distinct rows of ranks.
    """

    input_bytes: int
    files: int
    documents: int
    text: int
    meta: int
    exact: int
    near: int
    dropped_text: int
    pairs: int
    bucket_pairs: int
    edges: int
    texts: int
    texts_bytes: int
    fetched: int | None = None
    searches: int = 1
    decisions: int = 2
    lookups: int = 20
    note_bytes: int = 400
    report_bytes: int = 500_000
    shown_bytes: int = 1200 * 3800
    shard_bytes: float = 128e6
    part_bytes: int | None = None
    sizes: tuple[int, ...] = ()
    anchors: int = 0
    windows: int = 0
    cuts: int = 0
    asked: int = 0

    @classmethod
    def typical(cls, size: float) -> Corpus:
        """A crawl: documents of 4 kB in files of 1 GB; cleaning keeps four fifths; a fifth of these are exact copies, a tenth near ones.

        Of the words of the others, of 6 bytes, one of 14 begins an anchor, and a tenth begins a window whose anchor occurs again.
        """
        documents = int(0.8 * size / 4000)
        exact, near = documents // 5, documents // 10
        dropped = int(0.3 * documents * 3600)
        pairs, bucket_pairs = int(1.5 * near), 12 * near
        words = (3600 * documents - dropped) // 6
        return cls(
            int(size),
            max(1, round(size / 1e9)),
            documents,
            3600 * documents,
            200 * documents,
            exact,
            near,
            dropped,
            pairs,
            bucket_pairs,
            exact + int(1.2 * near),
            2 * pairs,
            2 * pairs * 3800,
            note_bytes=20_000,
            anchors=words // 14,
            windows=words // 10,
            cuts=documents // 10,
            asked=ANCHOR_ROW * (words // 14) + WINDOW_ROW * (words // 10),
        )


@dataclass(frozen=True)
class Counts:
    """One pass. `memory` is the peak of the fullest rank; `most_opens` are the opens of the rank with most."""

    opens: float = 0
    most_opens: float = 0
    inodes: float = 0
    bytes_read: float = 0
    bytes_written: float = 0
    messages: float = 0
    bytes_sent: float = 0
    memory: float = 0


class Model:
    """The counts of a run on some ranks."""

    def __init__(self, corpus: Corpus, ranks: int, dedup: DedupConfig | None = None) -> None:
        self.corpus, self.ranks, self.dedup = corpus, ranks, dedup or DedupConfig()
        sizes = corpus.sizes or (corpus.input_bytes // corpus.files,) * corpus.files
        files = [InputFile(f"{number}.jsonl", f"{number}.jsonl", size) for number, size in enumerate(sizes)]
        megabytes = None if corpus.part_bytes is None else corpus.part_bytes / 1e6
        self.part_bytes = input_files.part_bytes(files, megabytes)
        parts = input_files.parts(files, self.part_bytes)
        self.parts = len(parts)
        self.part_sizes = np.array([part.size for part in parts], dtype=float)
        self.spans = sum(len(part.spans) for part in parts)
        line = corpus.input_bytes / max(1, corpus.documents)
        self.input_read = sum(self._span_read(span.start, span.size, span.file.size, line) for part in parts for span in part.spans)
        kept = corpus.text - corpus.dropped_text
        order = Order.plan(["default"], corpus.input_bytes, corpus.shard_bytes / 1e6, 0, 0.005)
        self.shards = max(1, round(kept * 0.995 / corpus.shard_bytes)) + max(1, round(kept * 0.005 / corpus.shard_bytes))
        self.bins = order.groups * order.bins
        record = corpus.text + corpus.meta + HEAD * corpus.documents
        self.record_bytes = record
        self.runs = self.parts * max(1, math.ceil(record / self.parts / RUN_BYTES))
        self.row = row_type(0).itemsize
        self.elsewhere = (ranks - 1) / ranks
        del files, parts

    @staticmethod
    def _span_read(start: int, size: int, file_size: int, line: float) -> float:
        """Bytes read of a span: whole buffers until the last line that begins in the span ends."""
        rest = file_size - start
        return min(rest, math.ceil((size + line / 2) / BUFFER_BYTES) * BUFFER_BYTES)

    def passes(self) -> dict[str, Counts]:
        spans = {"spans": self._spans()} if self.dedup.spans else {}
        return {"list": self._list(), "read": self._read(), "clusters": self._clusters(), **spans, "shuffle": self._shuffle()}

    def _shared(self) -> float:
        """Memory of what every rank has of the whole run: files, parts and their runs."""
        return 900 * self.corpus.files + 500 * self.spans + 250 * self.parts

    def _list(self) -> Counts:
        c = self.corpus
        sample = min(c.input_bytes / c.files, input_files.BLOCKS * input_files.BLOCK_BYTES)
        return Counts(
            opens=c.files + 8,
            most_opens=math.ceil(c.files / self.ranks) + 8,
            inodes=1,
            bytes_read=c.files * sample,
            bytes_written=120 * c.files,
            messages=3 * (self.ranks - 1) + self.ranks * (self.ranks - 1),
            bytes_sent=(self.ranks - 1) * (300 * c.files + 40 * c.files),
            memory=BASE + 3 * self._shared(),
        )

    def _read(self) -> Counts:
        c, of_part = self.corpus, self.corpus.documents / self.parts
        index = (8 + self.row + 4 + 8 * self.dedup.bands) * c.documents
        opens = self.spans + 4 * self.parts
        run = min(RUN_BYTES, self.record_bytes / self.parts)
        return Counts(
            opens=opens,
            most_opens=math.ceil(self.parts / self.ranks) * opens / self.parts,
            inodes=2 * self.parts,
            bytes_read=self.input_read,
            bytes_written=self.record_bytes + index + c.note_bytes * self.parts,
            messages=self.ranks * (self.ranks - 1),
            memory=BASE + self._shared() + 1.3 * run + 3 * index / c.documents * of_part + 30 * MIB,
        )

    def _clusters(self) -> Counts:
        c, ranks, bands = self.corpus, self.ranks, self.dedup.bands
        mine, unique = c.documents / ranks, c.documents - c.exact
        slices = max(1, math.ceil(mine / duplicates.SLICE_ROWS))
        read = (self.row + 4 + 8 * bands * c.searches) * c.documents + (4 + 2 * self.row + HEAD) * c.texts + c.texts_bytes
        fetched = c.pairs * self.elsewhere if c.fetched is None else c.fetched
        sent = self.elsewhere * (
            (KEY_ROW + BEST_ROW) * (c.documents - c.exact * min(1, 1 / ranks)) + BAND_ROW * bands * unique + PAIR_ROW * c.bucket_pairs
        )
        sent += fetched * (12 + c.texts_bytes / max(1, c.texts)) + 250 * c.edges * self.elsewhere
        samples = distributed.SAMPLES * 16 * ranks * bands * slices * (ranks - 1)
        slice_rows = mine / slices
        # an exchange is an allgather and one alltoall for each mpi.MESSAGE_BYTES
        characters = 2 * c.pairs * c.texts_bytes / max(1, c.texts)
        turns = max(1, math.ceil(max(c.pairs / duplicates.PAIR_BATCH, characters / duplicates.BATCH_CHARACTERS) / ranks))
        band = 6 + math.ceil(slice_rows * BAND_ROW / mpi.MESSAGE_BYTES)
        key = 1 + 2 * (1 + math.ceil(slice_rows * KEY_ROW / mpi.MESSAGE_BYTES))
        rounds = (
            slices * (bands * band * c.searches + key)
            + 18
            + c.searches * (5 * turns + 10 + 3 * c.decisions)
            + 5 * c.lookups
            + 2 * (c.lookups - 1) / 3
        )
        memory = 33 * mine + 16 * mine + slice_rows * 7 * BAND_ROW + (PAIR_ROW * 4) * c.pairs / ranks + 600 * c.edges / ranks + 40 * MIB
        samples_held = 3 * distributed.SAMPLES * 16 * ranks
        looked_up = self.dedup.url + (self.dedup.exact or self.dedup.near) + bool(self.dedup.spans)  # records of searches, by rank 0
        return Counts(
            opens=self.parts + looked_up,
            most_opens=math.ceil(self.parts / ranks) + looked_up,
            bytes_read=read,
            messages=rounds * ranks * (ranks - 1) + 3 * (ranks - 1),
            bytes_sent=sent + samples,
            memory=BASE + self._shared() + memory + samples_held,
        )

    def _spans(self) -> Counts:
        c, ranks, memory = self.corpus, self.ranks, 1e6 * self.dedup.span_megabytes
        slices = [max(1, math.ceil(rows * size / memory / ranks)) for rows, size in ((c.anchors, ANCHOR), (c.windows, WINDOW))]
        sent = [rows / ranks * size / mpi.MESSAGE_BYTES for rows, size in ((c.anchors, ANCHOR_ROW), (c.windows, WINDOW_ROW))]
        rounds = 6 + sum(count * (3 + math.ceil(share / count)) for count, share in zip(slices, sent, strict=True))
        compared = 8 * c.anchors + spans.WINDOW.itemsize * c.windows
        batches = min(c.documents, c.text / span_search.BATCH_BYTES)
        return Counts(
            opens=8 * self.parts,
            most_opens=math.ceil(self.parts / ranks) * 8,
            inodes=3 * self.parts,
            bytes_read=2 * (self.record_bytes + self.row * (c.documents + 2 * batches)) + 3 * compared,
            bytes_written=compared + 12 * c.cuts + 128 * self.parts,
            messages=rounds * ranks * (ranks - 1),
            bytes_sent=self.elsewhere * c.asked,
            memory=BASE + self._shared() + min(memory, WINDOW * c.windows / ranks) + (c.anchors + c.windows) / 8 / ranks + 90e6,
        )

    def _shuffle(self) -> Counts:
        c, ranks = self.corpus, self.ranks
        dropped, written = c.exact + c.near, c.documents - c.exact - c.near
        with_drops = float(np.sum(1 - np.exp(-dropped * self.part_sizes / self.part_sizes.sum())))
        pieces = max(1, math.ceil(c.shard_bytes / sweep.PIECE_BYTES))
        segments = min(self.runs * self.shards * pieces, c.documents)
        text, share = c.text - c.dropped_text, written / max(1, c.documents)
        record = math.ceil(c.meta / max(1, c.documents) / 512) * 512
        tar = text + written * (2 * 512 + 256 + record)  # two headers; members are padded to 512 bytes
        entries = 450 * self.shards
        read = c.note_bytes * self.parts + (self.row + 8) * c.documents + (12 + self.row) * c.documents
        read += (8 + self.row) * c.documents + self.record_bytes + (2 * self.row + HEAD) * segments
        read += tar + 600 * self.shards + c.report_bytes + c.shown_bytes
        sent = self.elsewhere * (text + c.meta * share + written * (self.row + 16 + 12)) + 8 * self.bins * (ranks - 1) * 2
        rounds = math.ceil(self.shards / ranks) * pieces + 10
        piece = min(sweep.PIECE_BYTES, text / self.shards)
        mine = c.documents / ranks
        memory = 8 * mine + 5 * piece + 17 * dropped / ranks + 16 * self.bins + 350 * self.shards
        root = 2500 * self.shards
        of_parts, of_root = self.parts * (2 if self.dedup.spans else 1) + 2 * with_drops, 12 + 2 * bool(self.dedup.spans)
        return Counts(
            opens=of_parts + 6 * self.shards + of_root,
            most_opens=of_parts / ranks + 6 * math.ceil(self.shards / ranks) + of_root,
            inodes=with_drops + 2 * self.shards + 5 + bool(self.dedup.spans),
            bytes_read=read,
            bytes_written=tar + 17 * dropped + 600 * self.shards + entries + c.report_bytes,
            messages=rounds * ranks * (ranks - 1) + 9 * (ranks - 1),
            bytes_sent=sent,
            memory=BASE + self._shared() + memory + root,
        )


def totals(passes: dict[str, Counts]) -> Counts:
    """Sums over the passes; the most memory of any."""
    names = [name for name in Counts.__dataclass_fields__ if name != "memory"]
    sums: dict[str, Any] = {name: sum(getattr(counts, name) for counts in passes.values()) for name in names}
    return replace(Counts(**sums), memory=max(counts.memory for counts in passes.values()))
