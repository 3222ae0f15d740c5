"""The search for repeated spans over all parts (dedup.spans), in bounded memory.

Every part is read twice: for the anchors of its windows, and for the windows whose anchor occurs more than once in the corpus. Both are
written to files of the part, in sorted runs, and compared over all ranks in slices of their hashes. An interrupted run writes the files
that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from pipeline.common.artifact import Manifest
from pipeline.common.atomic_files import atomic_file
from pipeline.common.mpi import Comm
from pipeline.common.progress import SharedProgress
from pipeline.common.texts import in_batches
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import distributed, signatures, spans
from pipeline.data.dedup.paragraphs import Flags
from pipeline.data.shard import text_shards
from pipeline.data.shard.spill import read_at
from pipeline.data.shard.spilled_documents import SpillPool
from pipeline.data.words import Lookup

ANCHORS, WINDOWS, CUTS = SUFFIXES = (".anchors", ".windows", ".cuts.npy")  # of the files of a part
RUN_ROWS = 1 << 20  # rows after which a sorted run is written: 28 MB of windows
BATCH_BYTES = 1 << 18  # text whose windows are in memory at once: larger batches exceed the CPU caches
ANCHOR_BYTES, WINDOW_BYTES = 150, 300  # memory of a row that is compared
_ANCHOR = np.dtype([("hash", "<u8", (1,))])

Texts = Iterator[tuple[np.ndarray, list[str]]]
"""Batches of documents: their numbers in a source, and their texts."""

Source = tuple[Path, int, Callable[[], Texts]]
"""Documents of a rank: the path of their files without suffix, the number of the first one in the order of the corpus, and their reader."""


def parts(pool: SpillPool, drop: np.ndarray, dedup: DedupConfig) -> list[Source]:
    """The parts of this rank: of the documents that are not dropped, what dedup.paragraphs leaves."""

    def read(part: int) -> Texts:
        lines = Flags(pool.stem(part)) if dedup.paragraphs else None
        for numbers, texts in pool.batches(part, drop, BATCH_BYTES):
            pairs = zip(numbers.tolist(), texts, strict=True)
            yield numbers, [lines.without(*pair, dedup.paragraph_characters) for pair in pairs] if lines else texts

    return [(pool.stem(part), int(pool.starts[part]), partial(read, part)) for part in pool.mine]


def others(comm: Comm, dedup: DedupConfig, folder: Path) -> list[Source]:
    """This rank's shards of the corpora in dedup.against, as documents before all others; their files are in `folder`. Collective."""

    def read(path: Path, made: Manifest, name: str) -> Texts:
        first, shard = 0, f"{name.removeprefix(signatures.PREFIX).removesuffix(signatures.SUFFIX)}.tar"
        for texts in in_batches((text for text, _ in text_shards.verified(path, made, shard)), BATCH_BYTES):
            yield np.arange(first, first + len(texts)), [text.decode("utf-8") for text in texts]
            first += len(texts)

    listed = list(enumerate(comm.bcast(signatures.files(dedup.against) if comm.rank == 0 else None)))[comm.rank :: comm.size]
    return [(folder / f"against-{number}", (number - (1 << 30)) << 32, partial(read, *file)) for number, file in listed]


def find(comm: Comm, sources: list[Source], length: int, memory: float, descriptor: Callable[[Path], int]) -> dict[str, int]:
    """Find the repeated spans, and save what to cut from every source; returns `spans` of Clusters. Collective.

    Args:
        length: of a window, units.
        memory: bytes for the rows that a rank compares at a time.
        descriptor: opens a file, and keeps it open if it can.
    """

    def write(suffix: str, rows: Callable[[Path, int, Texts], Iterator[np.ndarray]]) -> None:
        missing = [source for source in sources if not source[0].with_suffix(suffix).exists()]
        with SharedProgress(comm, sum(comm.allgather(len(missing))), f"dedup: {suffix[1:]} of spans", "parts") as progress:
            for stem, first, read in missing:
                with atomic_file(stem.with_suffix(suffix)) as handle:
                    for batches in in_batches(rows(stem, first, read()), RUN_ROWS):
                        run = np.concatenate(batches)
                        handle.write(np.int64(len(run)).tobytes() + run[np.argsort(run["hash"][:, 0])].tobytes())
                progress.advance(1)
        comm.barrier()

    def compare(suffix: str, kind: np.dtype, row_bytes: int, choose: Callable[[np.ndarray], np.ndarray]) -> dict[Path, list[_Run]]:
        """The runs of every source, with the rows that `choose` chooses."""
        rows = sum(stem.with_suffix(suffix).stat().st_size for stem, _, _ in sources) // kind.itemsize
        count = distributed.slices(comm, rows, max(1, int(memory / row_bytes)))
        runs = {stem: _Run.all_of(stem.with_suffix(suffix), kind, descriptor, count) for stem, _, _ in sources}
        every = list(chain.from_iterable(runs.values()))
        for part in range(count):
            compared = [run.read(*run.bounds[part : part + 2]) for run in every]
            chosen = choose(np.concatenate([np.empty(0, dtype=kind), *compared]))
            for run, flags in zip(every, np.split(chosen, np.cumsum([len(of_run) for of_run in compared])[:-1]), strict=bool(every)):
                run.bits.append(np.packbits(flags))
        return runs

    def windows_with(anchors: list[_Run], first: int, documents: Texts) -> Iterator[np.ndarray]:
        """Yield the windows that have a chosen anchor."""
        known = np.concatenate([np.empty(0, np.uint64), *(run.chosen()["hash"][:, 0] for run in anchors)])
        lookup = Lookup(known, max(16, (8 * len(known)).bit_length()))
        for numbers, texts in documents if len(known) else ():
            windows = spans.Windows(texts, length)
            places, _ = lookup.find(windows.anchors)
            rows = np.empty(len(places), dtype=spans.WINDOW)
            rows["hash"], rows["index"] = windows.hashes(places), windows.indices[places]
            rows["number"] = first + numbers[windows.texts[places]].astype(np.int64)
            yield rows

    if any(comm.allgather(any(not stem.with_suffix(WINDOWS).exists() for stem, _, _ in sources))):
        write(ANCHORS, lambda _, __, documents: (spans.Windows(texts, length).distinct_anchors().view(_ANCHOR) for _, texts in documents))
        anchors = compare(ANCHORS, _ANCHOR, ANCHOR_BYTES, lambda rows: spans.several(comm, rows["hash"][:, 0]))
        write(WINDOWS, lambda stem, first, documents: windows_with(anchors[stem], first, documents))
    windows = compare(WINDOWS, spans.WINDOW, WINDOW_BYTES, lambda rows: spans.repeated(comm, rows, length))
    counts = np.zeros(3, dtype=np.int64)
    for stem, number, _ in sources:
        keys = [(rows["number"] - number) << 32 | rows["index"] for rows in (run.chosen() for run in windows[stem])]
        first = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *keys]))
        begins, ends = np.diff(first, prepend=first[:1] - length - 1) > length, np.diff(first, append=first[-1:] + length + 1) > length
        cuts = np.stack([first[begins], first[ends] + length])
        with atomic_file(stem.with_suffix(CUTS)) as handle:
            np.save(handle, np.stack([cuts[0] >> 32, *(cuts & 0xFFFFFFFF)]).astype("<u4"))
        counts += (len(np.unique(cuts[0] >> 32)), len(cuts[0]), np.sum(cuts[1] - cuts[0])) if number >= 0 else 0
    return dict(zip(("documents", "spans", "words"), sum(comm.allgather(counts)).tolist(), strict=True))


class _Run:
    """Sorted rows of a file; `bounds` are those of slices of hashes, `bits` has a bit for each row, whether it is chosen, by slice."""

    def __init__(self, descriptor: Callable[[], int], kind: np.dtype, place: int, slices: int) -> None:
        self._descriptor, self._kind, self._place = descriptor, kind, place + 8
        self._rows = int.from_bytes(read_at(descriptor(), 8, place), "little")
        self.end = self._place + self._rows * kind.itemsize
        of_rows = distributed.slice_of(self.read(0, self._rows)["hash"][:, 0], slices)
        self.bounds = np.searchsorted(of_rows, np.arange(slices + 1)).tolist()
        self.bits: list[np.ndarray] = []

    @classmethod
    def all_of(cls, path: Path, kind: np.dtype, descriptor: Callable[[Path], int], slices: int) -> list[_Run]:
        """All runs of a file."""
        runs: list[_Run] = []
        while (place := runs[-1].end if runs else 0) < path.stat().st_size:
            runs.append(cls(partial(descriptor, path), kind, place, slices))
        return runs

    def read(self, low: int, high: int) -> np.ndarray:
        """The rows low <= row < high."""
        size = self._kind.itemsize
        return np.frombuffer(read_at(self._descriptor(), (high - low) * size, self._place + low * size), dtype=self._kind)

    def chosen(self) -> np.ndarray:
        """The chosen rows."""
        pairs = zip(self.bits, pairwise(self.bounds), strict=True)
        flags = np.concatenate([np.unpackbits(bits, count=high - low) for bits, (low, high) in pairs])
        return self.read(0, self._rows)[flags.astype(bool)]
