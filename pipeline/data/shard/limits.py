"""Refuses a run of stage=shard that needs more files than the file system has left, or more memory than its ranks have, before it works.

`tools/audit_data` prints the counts of large runs.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from pipeline.common import host_memory
from pipeline.common.errors import UserError, Violation
from pipeline.config.data import DataConfig, DedupConfig
from pipeline.data.dedup import duplicates
from pipeline.data.read.input_files import InputPart
from pipeline.data.shard import spill, sweep

DOCUMENT_BYTES = 20_000
"""Mean text of a document until the documents are counted: few corpora have longer ones, so that no run is refused that would fit."""

_BASE = 150e6  # of a rank with all imports
_HELD, _IN_SLICE = 49, 200  # bytes per document: numbers, lengths, keys, hashes of a band; and while they are sorted and exchanged
_PART, _SHARD = 750, 350  # bytes on every rank
_LINE = 12  # bytes for a line of dedup.paragraphs, which is assumed to be twice as long as the shortest one


def files_of(parts: int, shards: int, data: DataConfig, dedup: DedupConfig) -> int:
    """The most files that a run has at one time: documents, completion record and drops of a part; shard and record."""
    of_part = 3 + 2 * data.save_dropped + dedup.url + dedup.paragraphs + 3 * bool(dedup.spans)
    return of_part * parts + (2 + dedup.save_signatures) * shards


def memory_of(documents: float, text: float, parts: int, ranks: int, bins: int, data: DataConfig, dedup: DedupConfig) -> float:
    """The memory of one of `ranks` ranks, bytes.

    Args:
        documents, text: number of documents and bytes of text of the corpus.
        bins: of all groups of the shuffle.
    """
    mine = documents / ranks
    compared = _HELD * mine + _IN_SLICE * min(mine, duplicates.SLICE_ROWS) if dedup.exact or dedup.near or dedup.url else 8 * mine
    compared = max(compared, _LINE * text / ranks / (2 * dedup.paragraph_characters) if dedup.paragraphs else 0)
    if dedup.spans:  # rows that are compared, at most 50 bytes a byte of text; a bit for each word; a run, and what is cut from a part
        compared = max(compared, min(1e6 * dedup.span_megabytes, 50 * text / ranks) + text / ranks / 48 + 3 * text / max(1, parts) + 90e6)
    run = 1.3 * min(spill.RUN_BYTES, text / max(1, parts))
    written = 16 * bins + (20 if dedup.spans else 8) * mine + 5 * min(sweep.PIECE_BYTES, data.shard_megabytes * 1e6, text)
    shards = text / (data.shard_megabytes * 1e6)
    return _BASE + _PART * parts + _SHARD * shards + max(run, compared, written)


def check(
    folder: Path,
    parts: list[InputPart],
    bins: int,
    ranks: tuple[int, int],
    data: DataConfig,
    dedup: DedupConfig,
    documents: int | None = None,
) -> None:
    """Check files and memory of a run. Call it on rank 0.

    Args:
        bins: of all groups of the shuffle.
        ranks: of the run, and on this node.

    Raises:
        UserError: with the number that decides, and the nearest setting that fits.
    """
    text = sum(span.size * span.file.expansion for part in parts for span in part.spans)
    violation = _files(folder, len(parts), text, data, dedup) or _memory(documents, text, len(parts), bins, ranks, data, dedup)
    if violation:
        raise UserError([violation])


def _files(folder: Path, parts: int, text: int, data: DataConfig, dedup: DedupConfig) -> Violation | None:
    state = os.statvfs(folder)
    if not state.f_files:
        return None  # a file system without a fixed number of files
    written = sum(len(files) for _, _, files in os.walk(folder))
    free, megabytes = state.f_favail + written, text / parts / 1e6
    needed = files_of(parts, math.ceil(text / (data.shard_megabytes * 1e6)), data, dedup)
    if needed <= free:
        return None
    shards, fix = data.shard_megabytes, "free some"
    while 2 * files_of(0, math.ceil(text / (shards * 1e6)), data, dedup) > free and shards < 2000:
        shards = min(2000.0, 2 * shards)
    left = free - files_of(0, math.ceil(text / (shards * 1e6)), data, dedup)
    if left > 0:
        part = math.ceil(1.05 * files_of(1, 0, data, dedup) * text / left / 1e6)
        larger = f" and data.shard_megabytes={shards:g}" if shards != data.shard_megabytes else ""
        fix = f"set data.part_megabytes={max(part, math.ceil(megabytes))}{larger}, in an empty data.shards, or free some"
    rule = f"needs {needed:,} files, of which the file system has {free:,} left ({parts:,} parts of {megabytes:.3g} MB)"
    return Violation("data.shards", folder, rule, fix)


def _memory(
    documents: int | None, text: int, parts: int, bins: int, ranks: tuple[int, int], data: DataConfig, dedup: DedupConfig
) -> Violation | None:
    world, local = ranks
    assumed = documents is None
    count = text / DOCUMENT_BYTES if documents is None else documents

    def needed(ranks: int) -> float:
        return memory_of(count, text, parts, ranks, bins, data, dedup)

    available = host_memory.available_bytes() / local
    if needed(world) <= available:
        return None
    enough = next((world << bit for bit in range(1, 20) if needed(world << bit) <= available), None)
    fewer = int(available * local / needed(world))
    if enough:
        fix = f"start {enough:,} ranks, {local} on a node"
        fix += f", or {fewer} on a node instead of {local}" if fewer else ""
    else:
        fix = f"start at most {fewer} ranks on a node" if fewer else "use nodes with more memory, or larger data.part_megabytes"
    assumption = f", if a document has {DOCUMENT_BYTES:,} bytes on average" if assumed else ""
    kept = "" if assumed else "; the parts that are read are kept"
    rule = f"needs {needed(world) / 1e9:.2f} GB of memory a rank for {count:,.0f} documents{assumption}"
    rule += f"; {available / 1e9:.2f} GB are available"
    return Violation("ranks", world, rule, fix + kept)
