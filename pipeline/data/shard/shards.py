"""Writes the shards, then the report and the manifest."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipeline.common import artifact, knobs
from pipeline.common.atomic_files import atomic_file, digest
from pipeline.common.mpi import Comm
from pipeline.config.cleaning import CleanConfig
from pipeline.config.data import DataConfig, DedupConfig
from pipeline.data.dedup import signatures
from pipeline.data.dedup.clusters import Clusters
from pipeline.data.read import input_files
from pipeline.data.read.documents import DEFAULT_CORPUS, ReadOptions, add_count, add_counts, add_in_group
from pipeline.data.read.input_files import InputFile, Listing
from pipeline.data.shard import dropped, shard_report, text_shards
from pipeline.data.shard.process_part import PartCounts
from pipeline.data.shard.shuffle import ShardPlan
from pipeline.data.shard.sweep import Swept
from pipeline.data.shard.text_shards import SPLITS

log = logging.getLogger("pipeline")

Entries = dict[str, dict[str, Any]]

OUTPUTS = ("*-?????.tar", f"{signatures.PREFIX}*.safetensors", "report.json", "report.html", "quarantine.jsonl", dropped.NAME)
"""Glob patterns of the files of a folder of text shards, besides the manifest."""


@dataclass
class WrittenShard:
    """What was written, summed over shards.

    Attributes:
        files: manifest entries of every shard, in the order of the plan.
        languages: language -> [documents, bytes].
        lengths: log2 of the bytes -> documents.
        scores: language -> score -> documents.
        repeated: corpus -> [documents, bytes] without text after dedup.paragraphs and dedup.spans.
    """

    files: list[Entries] = field(default_factory=list)
    languages: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    scores: dict[str, dict[str, int]] = field(default_factory=dict)
    repeated: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def gathered(cls, comm: Comm, notes: list[dict[str, Any]]) -> WrittenShard:
        """Sum the results of `write` of all ranks on rank 0; the other ranks return the sum of theirs. Collective.

        Args:
            notes: of every `size`-th shard of the plan.
        """
        mine = cls()
        for note in notes:
            (corpus,) = {entry["corpus"] for entry in note["files"].values() if "corpus" in entry}
            repeated = {corpus: note["repeated"]} if note["repeated"][0] else {}
            mine._add(cls([note["files"]], note["languages"], note["lengths"], note["scores"], repeated))
        ranks = comm.gather(mine)
        if ranks is None:
            return mine
        everything = cls()
        for rank in ranks:
            everything._add(rank)
        turns = zip_longest(*(rank.files for rank in ranks))
        everything.files = [files for turn in turns for files in turn if files is not None]
        return everything

    def _add(self, other: WrittenShard) -> None:
        self.files += other.files
        add_counts(self.languages, other.languages)
        add_counts(self.repeated, other.repeated)
        pairs = [(self.lengths, other.lengths), *((self.scores.setdefault(name, {}), scores) for name, scores in other.scores.items())]
        for mine, others in pairs:
            for bit, documents in others.items():
                mine[bit] = mine.get(bit, 0) + documents

    def percentiles(self) -> dict[str, list[float]]:
        """Return for every language the lowest scores that 0, 1, ..., 100 percent of its documents do not exceed."""
        by_language = {}
        for language, counts in sorted(self.scores.items()):
            scores = sorted(counts, key=float)
            below = np.cumsum([counts[score] for score in scores])
            places = np.searchsorted(below, np.maximum(1, np.ceil(below[-1] * np.arange(101) / 100)))
            by_language[language] = [float(scores[place]) for place in places.tolist()]
        return by_language


def write(folder: Path, plan: ShardPlan, swept: Iterator[Swept], data: DataConfig, dedup: DedupConfig, records: Path) -> dict[str, Any]:
    """Write one shard, and its signatures if dedup.save_signatures is set.

    Args:
        records: folder of the completion records, where the documents are saved that dedup.paragraphs and dedup.spans drop.

    Returns:
        {"files": manifest entries, "languages": language -> [documents, bytes], "lengths": log2 of the bytes -> documents,
        "scores": language -> score -> documents, "repeated": [documents, bytes] without text after them}.
    """
    languages: dict[str, list[int]] = {}
    scores: dict[str, Counter[str]] = {}
    lengths: dict[str, int] = {}
    hashes: list[tuple[np.ndarray, np.ndarray]] = []
    repeated, written = [0, 0], 0

    def documents(add: dropped.Add | None) -> Iterator[tuple[bytes, bytes]]:
        nonlocal written
        for document in swept:
            size = len(document.text)
            if document.repeated:
                repeated[:] = repeated[0] + 1, repeated[1] + size
                if add:
                    add(orjson.loads(document.meta), "dedup", "all text is repeated", document.text.decode("utf-8"))
                continue
            language = document.row["language"].decode(errors="ignore")
            add_count(languages, language, 1, size)
            if not np.isnan(document.row["score"]):
                scores.setdefault(language, Counter())[f"{document.row['score']:.4g}"] += 1
            bit = str(size.bit_length() - 1)
            lengths[bit] = lengths.get(bit, 0) + 1
            written += 1
            if dedup.save_signatures:
                hashes.append((document.row["exact"].copy(), document.row["minhash"].copy()))
            yield document.text, document.meta

    save = data.save_dropped and (dedup.paragraphs or dedup.spans)
    with (
        dropped.writer(records / f"{plan.name}{dropped.BY_PARAGRAPHS}") if save else nullcontext() as add,
        atomic_file(folder / plan.name) as handle,
    ):
        text_shards.write(handle, documents(add), data.documents_per_member)
    text_bytes = sum(size for _, size in languages.values())
    fields = {"split": plan.split, "corpus": plan.corpus, "documents": written, "text_bytes": text_bytes}
    files = {plan.name: artifact.entry(folder / plan.name, **fields)}
    if hashes:
        name = f"{signatures.PREFIX}{plan.name.removesuffix('.tar')}{signatures.SUFFIX}"
        keys, minhash = (np.stack(column) for column in zip(*hashes, strict=True))
        files[name] = signatures.write(folder / name, keys, minhash, dedup)
    return {"files": files, "languages": languages, "lengths": lengths, "scores": scores, "repeated": repeated}


def publish(
    folder: Path,
    settings: dict[str, Any],
    written: WrittenShard,
    counts: PartCounts,
    duplicated: Clusters,
    excerpts: shard_report.Excerpts,
    inputs: list[InputFile],
    compare: str | None = None,
) -> dict[str, Any]:
    """Write report and manifest after all shards are written; return the totals.

    Args:
        written: on rank 0.
        compare: folder of shards beside which the page shows these.
    """
    files: Entries = {name: entry for of_shard in written.files for name, entry in of_shard.items()}
    totals = {
        **text_shards.totals(files, ("documents", "text_bytes")),
        "files": len(inputs),
        "skipped": sum(number for reasons in counts.skipped.values() for number, _ in reasons.values()),
        "empty_documents": counts.empty,
        "bad_documents": len(counts.bad),
        "cleaned_documents": sum(n for step in counts.steps.values() for n, _ in step.dropped.values()),
        "exact_duplicates": duplicated.exact,
        "near_duplicates": duplicated.near,
        "repeated_documents": sum(documents for documents, _ in written.repeated.values()),
    }
    if duplicated.spans:
        totals["repeated_spans"] = duplicated.spans
    if (folder / dropped.NAME).exists():
        files[dropped.NAME] = artifact.entry(folder / dropped.NAME)
    for corpus, (documents, size) in sorted(written.repeated.items()):
        add_in_group(counts.lost, corpus, "dedup: all text repeated", documents, size)
    output = {
        **{key: totals[key] for key in (*SPLITS, "corpora", "repeated_documents")},
        "languages": dict(sorted(written.languages.items(), key=lambda entry: (-entry[1][1], entry[0]))),
        "lengths": {bit: written.lengths[bit] for bit in sorted(written.lengths, key=int)},
        "scores": written.percentiles(),
    }
    made = shard_report.build(counts, duplicated, excerpts, output, settings, inputs)
    for corpus in made["warnings"]:
        shares = 100 * corpus["kept"] / corpus["read"], 100 * corpus["kept_bytes"] / max(1, corpus["read_bytes"])
        log.warning("shard: %s keeps %.0f %% of its documents and %.0f %% of its text; report.html says why", corpus["name"], *shares)
    pages = {
        "report.json": orjson.dumps(made, option=orjson.OPT_INDENT_2) + b"\n",
        "report.html": shard_report.html(made, compare).encode("utf-8", "replace"),
        "quarantine.jsonl": shard_report.quarantine(counts.bad),
    }
    for name, content in pages.items():
        if content:
            with atomic_file(folder / name) as handle:
                handle.write(content)
            if name != "report.html":  # it shows the date: the checksums of two equal runs are equal
                files[name] = artifact.entry(folder / name)
    if written.scores:
        totals["scores"] = output["scores"]
    artifact.write(folder, artifact.Manifest("shard", settings, files, totals))
    return totals


def list_input(data: DataConfig, clean: CleanConfig, dedup: DedupConfig) -> tuple[Listing, dict[str, Any]]:
    """Return what was found in the input, and all settings that determine the shards, except the content of the files."""
    if data.compare is not None:
        artifact.read(Path(data.compare), key="data.compare", stage="shard")
    listing = input_files.find({DEFAULT_CORPUS: data.input, **data.corpora}, data.suffixes, data.exclude)
    against = [artifact.fingerprint(artifact.read(Path(folder), key="dedup.against", stage="shard")) for folder in dedup.against]
    fields = ("seed", "shard_megabytes", "validation_fraction", "documents_per_member", "save_dropped")
    # What came later is recorded where it has an effect: folders of earlier versions stay complete.
    later = {
        "data.sample": data.sample == 1,
        "clean.allow.blocked": not clean.allow.blocked,
        "clean.allow.url_field": not clean.allow.blocked,
        "dedup.spans": dedup.spans is None,
        "dedup.span_megabytes": True,
    }
    words = shlex.split(clean.score.command or "")
    settings = {
        **{f"data.{name}": value for name, value in vars(ReadOptions.of(data)).items()},
        **{f"data.{name}": getattr(data, name) for name in fields},
        "clean.steps": list(clean.steps),
        **{key: value for step in clean.steps for key, _, value in knobs.walk(getattr(clean, step), f"clean.{step}.")},
        **{key: value for key, _, value in knobs.walk(dedup, "dedup.")},
        "dedup.against": against,
        **({"clean.contamination.files": _digests(clean.contamination.files)} if "contamination" in clean.steps else {}),
        **({"clean.allow.blocked": _digests(clean.allow.blocked)} if "allow" in clean.steps else {}),
        **(
            {"clean.score.command": [words, _digests([word for word in words[1:] if Path(word).is_file()])]}
            if "score" in clean.steps
            else {}
        ),
        **{f"clean.{name}.model": _digests([model]) for name in ("language", "score") if (model := getattr(clean, name).model)},
    }
    return listing, {key: value for key, value in settings.items() if not later.get(key)}


def _digests(names: list[str]) -> list[str]:
    """Name and checksum of files; without a checksum for one that is missing, which the cleaner refuses."""
    paths = [Path(name).expanduser() for name in names]
    return [f"{path.name} {digest(path) if path.is_file() else ''}" for path in paths]
