"""Writes the shards from the pool, then the report and the manifest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipeline.common import artifact
from pipeline.common.atomic_files import atomic_file
from pipeline.config.data import DataConfig, DedupConfig
from pipeline.data.dedup import signatures
from pipeline.data.dedup.clusters import Clusters
from pipeline.data.read.input_files import InputFile
from pipeline.data.shard import dropped, report, text_shards
from pipeline.data.shard.process_part import PartCounts
from pipeline.data.shard.shuffle import SPLITS, ShardPlan
from pipeline.data.shard.spilled_documents import Pool

Entries = dict[str, dict[str, Any]]

OUTPUTS = ("*-?????.tar", f"{signatures.PREFIX}*.safetensors", "report.json", "report.html", "quarantine.jsonl", dropped.NAME)
"""Glob patterns of the files of a folder of text shards, besides the manifest."""


def write(
    folder: Path, plan: ShardPlan, pool: Pool, drop: np.ndarray, data: DataConfig, dedup: DedupConfig, records: Path
) -> dict[str, Any]:
    """Write one shard, and its signatures if dedup.save_signatures is set.

    Args:
        records: folder of the completion records, where the documents are saved that dedup.paragraphs drops.
        drop: sorted numbers of the documents to drop.

    Returns:
        {"files": manifest entries, "languages": language -> [documents, bytes], "lengths": log2 of the bytes -> documents,
        "repeated": [documents, bytes] without text after dedup.paragraphs}.
    """
    languages: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    rows: list[np.void] = []
    repeated = [0, 0]

    def documents(add: dropped.Add | None) -> Iterator[tuple[bytes, bytes]]:
        for number, meta, original, row in pool.shard_documents(plan, drop):
            text = pool.without_repeated(number, original, dedup.paragraph_characters) if dedup.paragraphs else original
            if not text.strip():
                repeated[:] = repeated[0] + 1, repeated[1] + len(original)
                if add:
                    add(orjson.loads(meta), "dedup", "all lines are repeated", original.decode("utf-8"))
                continue
            total = languages.setdefault(row["language"].decode(), [0, 0])
            total[:] = total[0] + 1, total[1] + len(text)
            bit = str(len(text).bit_length() - 1)
            lengths[bit] = lengths.get(bit, 0) + 1
            rows.append(row)
            yield text, meta

    save = data.save_dropped and dedup.paragraphs
    with (
        dropped.writer(records / f"{plan.name}{dropped.BY_PARAGRAPHS}") if save else nullcontext() as add,
        atomic_file(folder / plan.name) as handle,
    ):
        text_shards.write(handle, documents(add), data.documents_per_member)
    text_bytes = sum(size for _, size in languages.values())
    fields = {"split": plan.split, "corpus": plan.corpus, "documents": len(rows), "text_bytes": text_bytes}
    files = {plan.name: artifact.entry(folder / plan.name, **fields)}
    if dedup.save_signatures and rows:
        name = f"{signatures.PREFIX}{plan.name.removesuffix('.tar')}.safetensors"
        table = np.array(rows, dtype=rows[0].dtype)
        files[name] = signatures.write(folder / name, table["exact"], table["minhash"], dedup)
    return {"files": files, "languages": languages, "lengths": lengths, "repeated": repeated}


def publish(
    folder: Path, settings: dict[str, Any], written: Entries, counts: PartCounts, found: Clusters, pool: Pool, inputs: list[InputFile]
) -> dict[str, Any]:
    """Write report and manifest after all shards are written; return the totals.

    Args:
        written: shard -> result of `write`.
        inputs: the files that were read.
    """
    files: Entries = {name: entry for shard in written.values() for name, entry in shard["files"].items()}
    totals = {
        **totals_of(files, ("documents", "text_bytes")),
        "files": len(inputs),
        "skipped": sum(number for reasons in counts.skipped.values() for number, _ in reasons.values()),
        "empty_documents": counts.empty,
        "bad_documents": len(counts.bad),
        "cleaned_documents": sum(n for step in counts.steps.values() for n, _ in step.dropped.values()),
        "exact_duplicates": found.exact,
        "near_duplicates": found.near,
        "repeated_documents": sum(shard["repeated"][0] for shard in written.values()),
    }
    if (folder / dropped.NAME).exists():
        files[dropped.NAME] = artifact.entry(folder / dropped.NAME)
    for name, shard in written.items():
        if shard["repeated"][0]:
            counts.count_lost(files[name]["corpus"], "dedup: all lines repeated", *shard["repeated"])
    output = {
        **{key: totals[key] for key in (*SPLITS, "corpora", "repeated_documents")},
        "languages": _sorted_languages(written),
        "lengths": _lengths(written),
    }
    made = report.build(counts, found, pool, output, settings, inputs)
    pages = {
        "report.json": report.as_json(made),
        "report.html": report.html(made).encode("utf-8", "replace"),
        "quarantine.jsonl": report.quarantine(counts.bad),
    }
    for name, content in pages.items():
        if content:
            with atomic_file(folder / name) as handle:
                handle.write(content)
            if name != "report.html":  # it shows the date: the checksums of two equal runs are equal
                files[name] = artifact.entry(folder / name)
    artifact.write(folder, artifact.Manifest("shard", settings, files, totals))
    return totals


def totals_of(files: Entries, counted: tuple[str, ...]) -> dict[str, Any]:
    """Sum fields of the shards of every split, and of every split of every corpus.

    Args:
        counted: fields of an entry; text_bytes is named bytes in the sum.
    """

    def sums(split: str, corpus: str | None) -> dict[str, int]:
        chosen = [e for e in files.values() if e.get("split") == split and corpus in (None, e["corpus"])]
        return {"shards": len(chosen), **{field.removeprefix("text_"): sum(entry[field] for entry in chosen) for field in counted}}

    corpora = sorted({entry["corpus"] for entry in files.values() if "split" in entry})
    by_corpus = {corpus: {split: sums(split, corpus) for split in SPLITS} for corpus in corpora}
    return {**{split: sums(split, None) for split in SPLITS}, "corpora": by_corpus}


def _sorted_languages(written: Entries) -> dict[str, list[int]]:
    """Language -> [documents, bytes] of all shards, in descending order of bytes."""
    languages: dict[str, list[int]] = {}
    for shard in written.values():
        for code, (documents, size) in shard["languages"].items():
            total = languages.get(code, [0, 0])
            languages[code] = [total[0] + documents, total[1] + size]
    return dict(sorted(languages.items(), key=lambda entry: (-entry[1][1], entry[0])))


def _lengths(written: Entries) -> dict[str, int]:
    """K -> number of documents with 2**k to 2**(k + 1) - 1 bytes, in all shards."""
    lengths: dict[int, int] = {}
    for shard in written.values():
        for bit, documents in shard["lengths"].items():
            lengths[int(bit)] = lengths.get(int(bit), 0) + documents
    return {str(bit): lengths[bit] for bit in sorted(lengths)}
