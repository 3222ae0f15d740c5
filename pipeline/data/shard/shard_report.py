"""The report of the shard stage: input, effect of every step with reasons, output; as JSON and as an HTML page.

report.json depends neither on the number of ranks nor on the time of the run; the page also shows the date.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipeline.common import page
from pipeline.common.mpi import Comm
from pipeline.common.page import Bar, Bold, megabytes
from pipeline.data.clean.cleaner import StepCounts, turned_off
from pipeline.data.dedup.clusters import Cluster, Clusters
from pipeline.data.dedup.distributed import fetch
from pipeline.data.read import inventory
from pipeline.data.read.input_files import InputFile
from pipeline.data.shard.process_part import KEPT, PartCounts
from pipeline.data.shard.spilled_documents import SpillPool
from pipeline.data.shard.text_shards import SPLITS

EXCERPT = 300
WARN_SHARE = 0.5
"""The page warns of a corpus that loses this share of its documents or of its text, and of a language that loses it to cleaning."""
WARN_CLEANING = 0.3
"""The page warns of a corpus that loses this share of its documents or of its text to rules for quality."""
WARN_LANGUAGE = 20
"""The page does not warn of a language with fewer documents: texts of other languages are taken for it."""
LISTED_BAD = 100
LISTED_REASONS = 30
"""Suffixes, and reasons for what is not read, of a corpus on the HTML page; report.json lists all of them."""
SHOWN_PERCENTS = (1, 10, 25, 50, 75, 90, 99)
SHOWN_CLUSTERS = 20
"""Clusters of each kind on the HTML page; report.json lists more."""

Excerpts = dict[int, tuple[str, str]]
"""Number of a document -> its identity, and the beginning of its text."""

_BAD = ("file", "position", "reason", "lost_bytes")


def build(
    counts: PartCounts, clusters: Clusters, excerpts: Excerpts, output: dict[str, Any], made_with: dict[str, Any], files: list[InputFile]
) -> dict[str, Any]:
    """Build the report as JSON; `output` is what shards have: totals, languages, lengths, and percentiles of the scores."""
    written = output["corpora"]
    made = {
        "settings": made_with,
        "kept": {
            name: [sum(written[name][split][field] for split in SPLITS) if name in written else 0 for field in ("documents", "bytes")]
            for name in counts.read
        },
        "lost": counts.lost,
        "languages": {language: dict(sorted(reasons.items())) for language, reasons in sorted(counts.languages.items())},
        "input": {
            "documents": counts.documents,
            "bytes": counts.bytes,
            "empty_documents": counts.empty,
            "bad_documents": len(counts.bad),
            "unchecked_files": counts.unchecked,
            "corpora": counts.read,
            "files": inventory.by_suffix(files),
            "skipped": {corpus: dict(sorted(reasons.items())) for corpus, reasons in sorted(counts.skipped.items())},
            "same_names": {corpus: {"names": number, "example": names} for corpus, (number, names) in inventory.same_names(files).items()},
        },
        "bad": [dict(zip(_BAD, bad, strict=True)) for bad in sorted(counts.bad)[:LISTED_BAD]],
        "steps": [{"step": name, "notes": counts.notes.get(name, {}), **_step(step)} for name, step in counts.steps.items()],
        "duplicates": {
            "exact": clusters.exact,
            "near": clusters.near,
            "chained": clusters.chained,
            "repeated": output.pop("repeated_documents"),
            **({"spans": clusters.spans} if clusters.spans else {}),
            "cluster_sizes": {str(size): number for size, number in sorted(clusters.sizes.items())},
            "clusters": [_cluster(cluster, excerpts) for cluster in clusters.clusters],
        },
        "output": output,
    }
    return {"warnings": [corpus for name in sorted(counts.read) if (corpus := _corpus(made, name))["warned"]], **made}


def _step(counts: StepCounts) -> dict[str, Any]:
    """The report entry of a cleaning step."""
    examples = {
        reason: [
            {"id": identity, "corpus": corpus, "language": language, "before": before, "after": after}
            for _, identity, before, after, corpus, language in sorted(shown, key=lambda example: example[4:])
        ]
        for reason, shown in sorted(counts.examples.items())
    }
    return {
        "documents": counts.documents,
        "bytes": counts.bytes,
        "dropped": {reason: {"documents": n, "bytes": size} for reason, (n, size) in sorted(counts.dropped.items())},
        "tagged": {reason: {"documents": n, "bytes": size} for reason, (n, size) in sorted(counts.tagged.items())},
        "changed": dict(sorted(counts.changed.items())),
        "removed": dict(sorted(counts.removed.items())),
        "examples": examples,
    }


def excerpts_of(comm: Comm, pool: SpillPool, duplicated: Clusters) -> Excerpts:
    """What the report shows of the documents in clusters, read by the ranks that hold them; on rank 0. Collective."""

    def read(numbers: Sequence[int]) -> list[bytes]:
        records = [pool.record(number) for number in numbers]
        return [orjson.dumps((orjson.loads(meta)["id"], text[: 4 * EXCERPT].decode("utf-8", "ignore")[:EXCERPT])) for meta, text in records]

    listed = duplicated.clusters if comm.rank == 0 else []
    shown = {number for cluster in listed for number in (cluster.kept, *cluster.dropped[:5]) if number is not None}
    numbers = np.array(sorted(shown), dtype=np.int64)
    return dict(zip(numbers.tolist(), map(orjson.loads, fetch(comm, numbers, pool.holders_of(numbers), read)), strict=True))


def _cluster(cluster: Cluster, excerpts: Excerpts) -> dict[str, Any]:
    """The report entry of a cluster of duplicates, with excerpts of at most five dropped documents."""

    def document(number: int) -> dict[str, Any]:
        identity, begins = excerpts[number]
        return {"id": identity, "begins": begins}

    return {
        "kind": cluster.kind,
        "documents": cluster.size,
        "kept": None if cluster.kept is None else document(cluster.kept),
        "dropped": [document(number) for number in cluster.dropped[:5]],
        "jaccard": sorted({round(jaccard, 3) for jaccard in cluster.jaccard}),
    }


def quarantine(bad: list[list[Any]]) -> bytes:
    """The content of quarantine.jsonl: all unreadable input."""
    return b"".join(orjson.dumps(dict(zip(_BAD, entry, strict=True))) + b"\n" for entry in sorted(bad))


def html(report: dict[str, Any], compare: str | None = None) -> str:
    """The content of report.html: one self-contained HTML page. It differs between equal runs only in the date.

    Args:
        compare: folder with the report beside which this one is shown.
    """
    output = report["output"]
    other = None if compare is None else orjson.loads((Path(compare) / "report.json").read_bytes())
    corpora = [_corpus(report, name) for name in sorted(report["input"]["corpora"])]
    return page.render(
        "data_report.html.jinja",
        "Data report",
        report=report,
        compare=compare,
        setting_rows=[] if other is None else sorted(_setting_rows(report["settings"], other["settings"])),
        compared_rows=[] if other is None else list(_compared_rows(report, other)),
        excerpt=EXCERPT,
        kept=[sum(entry[field] for entry in report["kept"].values()) for field in (0, 1)],
        corpora=corpora,
        lost_rows=[row for corpus in corpora for row in _lost_rows(corpus)],
        flow_rows=_flow_rows(report),
        cleaned_languages=cleaned_languages(report["languages"]),
        steps=[{"name": step["step"], "notes": step["notes"], "reasons": _reasons(step)} for step in report["steps"]],
        cluster_sizes=[[int(size), number] for size, number in report["duplicates"]["cluster_sizes"].items()],
        clusters=_shown_clusters(report["duplicates"]["clusters"]),
        corpus_rows=[
            [corpus["name"], corpus["read"], megabytes(corpus["read_bytes"]), *_splits(output["corpora"].get(corpus["name"], {}))]
            for corpus in corpora
        ],
        language_rows=_share_rows([(code or "unknown", number, size) for code, (number, size) in output["languages"].items()]),
        length_rows=_share_rows([(f"{1 << int(bit):,} to {(2 << int(bit)) - 1:,}", n, n) for bit, n in output["lengths"].items()]),
        score_rows=[
            [code or "unknown", *(f"{scores[percent]:.4g}" for percent in SHOWN_PERCENTS)] for code, scores in output["scores"].items()
        ],
        file_rows=list(_input_rows(report["input"]["files"])),
        skipped_rows=list(_input_rows(report["input"]["skipped"])),
        bad_rows=[[bad["file"], bad["position"], bad["reason"], bad["lost_bytes"] or ""] for bad in report["bad"]],
    )


def _corpus(report: dict[str, Any], name: str) -> dict[str, Any]:
    """What was read and kept of a corpus, and why documents were dropped, the commonest reason first."""
    (read, read_bytes), (kept, kept_bytes) = report["input"]["corpora"][name], report["kept"][name]
    lost = sorted(report["lost"].get(name, {}).items(), key=lambda entry: (-entry[1][0], entry[0]))
    reasons = [[reason, *sizes, turned_off(*reason.split(": ", 1))] for reason, sizes in lost]
    cleaned = [sum(row[field] for row in reasons if row[3]) for field in (1, 2)]
    warned = bool(read) and (
        min(kept / read, kept_bytes / max(1, read_bytes)) <= 1 - WARN_SHARE
        or max(cleaned[0] / read, cleaned[1] / max(1, read_bytes)) > WARN_CLEANING
    )
    sizes = {"read": read, "read_bytes": read_bytes, "kept": kept, "kept_bytes": kept_bytes}
    return {"name": name, **sizes, "reasons": reasons, "warned": warned}


def _setting_rows(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[list[Any]]:
    """The settings that differ between two reports; of cleaning steps that only one of them has, their names."""
    ours, theirs = ({"data.sample": 1.0, **made} for made in (ours, theirs))
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            yield [key, *(orjson.dumps(made[key]).decode()[:EXCERPT] for made in (ours, theirs))]


def _compared_rows(*reports: dict[str, Any]) -> Iterator[list[Any]]:
    """What two reports count of every corpus and language: documents that were kept, and why others were dropped."""
    counted: dict[str, list[tuple[int, int]]] = {}
    for place, report in enumerate(reports):
        read = report["input"]["corpora"]
        rows = [(f"{name}: read", documents, documents) for name, (documents, _) in read.items()]
        rows += [(f"{name}: kept", documents, read[name][0]) for name, (documents, _) in report["kept"].items()]
        rows += [(f"{name}: {reason}", lost, read[name][0]) for name, lots in report["lost"].items() for reason, (lost, _) in lots.items()]
        for language, reasons in report["languages"].items():
            rows.append((f"{language or 'unknown'}: kept by cleaning", reasons.get(KEPT, [0])[0], sum(n for n, _ in reasons.values())))
        for name, documents, whole in rows:
            counted.setdefault(name, [(0, 0)] * len(reports))[place] = documents, whole
    for name, counts in counted.items():
        yield [name, *(value for documents, whole in counts for value in (documents, Bar(documents, whole)))]


def _input_rows(counts: dict[str, dict[str, list[int]]]) -> Iterator[list[Any]]:
    """The rows of a table of files: corpus, suffix or reason, number, MB; of every corpus the most frequent ones first."""
    for corpus, entries in counts.items():
        ordered = sorted(entries.items(), key=lambda entry: (-entry[1][0], entry[0]))
        yield from ([corpus, name, number, megabytes(size)] for name, (number, size) in ordered[:LISTED_REASONS])
        if more := ordered[LISTED_REASONS:]:
            number, size = (sum(counted[field] for _, counted in more) for field in (0, 1))
            yield [corpus, f"{len(more):,} others", number, megabytes(size)]


def _lost_rows(corpus: dict[str, Any]) -> Iterator[list[Any]]:
    """The share of a corpus that is kept, and the reasons for the remainder."""
    name, read = corpus["name"], corpus["read"]
    yield [Bold(f"{name}: kept"), corpus["kept"], megabytes(corpus["kept_bytes"]), Bar(corpus["kept"], read)]
    for reason, lost, size, _ in corpus["reasons"]:
        yield [f"{name}: {reason}", lost, megabytes(size), Bar(lost, read)]
    removed = corpus["read_bytes"] - corpus["kept_bytes"] - sum(size for _, _, size, _ in corpus["reasons"])
    yield [f"{name}: removed from kept documents", "", megabytes(removed), ""]


def cleaned_languages(languages: dict[str, dict[str, list[int]]]) -> list[dict[str, Any]]:
    """What cleaning dropped of every language, and why: the language with the most documents first."""
    rows = []
    for language, reasons in languages.items():
        read = sum(documents for documents, _ in reasons.values())
        lost = sorted(((reason, documents) for reason, (documents, _) in reasons.items() if reason != KEPT), key=lambda row: -row[1])
        dropped = sum(documents for _, documents in lost)
        unwanted = reasons.get("language: other language", [0, 0])[0]
        rows.append(
            {
                "name": language or "unknown",
                "read": read,
                "row": [language or "unknown", read, dropped, Bar(dropped, read), ", ".join(f"{reason} ({n:,})" for reason, n in lost[:3])],
                "dropped": dropped,
                "reasons": lost[:3],
                "warned": read >= WARN_LANGUAGE and dropped - unwanted >= WARN_SHARE * read,
            }
        )
    return sorted(rows, key=lambda row: (-row["read"], row["name"]))


def _flow_rows(report: dict[str, Any]) -> list[list[Any]]:
    """The documents and bytes of every step."""
    given, output, duplicates = report["input"], report["output"], report["duplicates"]
    rows: list[list[Any]] = [["read", given["documents"], megabytes(given["bytes"]), "", "", ""]]
    for step in report["steps"]:
        lost = sum(entry["documents"] for entry in step["dropped"].values())
        changed, removed = sum(step["changed"].values()), sum(step["removed"].values())
        size = megabytes(step["bytes"])
        rows.append([f"input of {step['step']}", step["documents"], size, lost or "", changed or "", f"{removed:,}" if changed else ""])
    dropped = duplicates["exact"] + duplicates["near"] + duplicates["repeated"]
    kept = sum(output[split]["documents"] for split in SPLITS)
    rows.append(["input of deduplication", kept + dropped, "", dropped or "", "", ""])
    rows.append(["written", kept, megabytes(sum(output[split]["bytes"] for split in SPLITS)), "", "", ""])
    return rows


def _reasons(step: dict[str, Any]) -> list[tuple[str, int, str, list[dict[str, Any]]]]:
    """The documents that a step dropped and changed: reason, number, what happened, and examples."""
    rows = [(reason, entry["documents"], f"{megabytes(entry['bytes'])} MB dropped") for reason, entry in step["dropped"].items()]
    rows += [(reason, entry["documents"], f"{megabytes(entry['bytes'])} MB tagged") for reason, entry in step["tagged"].items()]
    for reason, number in step["changed"].items():
        size = step["removed"].get(reason, 0)
        rows.append((reason, number, f"changed, {abs(size):,} bytes {'removed' if size >= 0 else 'added'}"))
    return [(*row, step["examples"].get(row[0], [])) for row in rows]


def _shown_clusters(clusters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The largest clusters of each kind."""
    for kind in ("near", "exact"):
        for cluster in [cluster for cluster in clusters if cluster["kind"] == kind][:SHOWN_CLUSTERS]:
            kept, jaccard = cluster["kept"] or {"id": "a document of another corpus", "begins": ""}, ""
            if kind == "near":
                bounds = sorted({cluster["jaccard"][0], cluster["jaccard"][-1]})
                jaccard = ", Jaccard index " + " to ".join(f"{index:.2f}" for index in bounds)
            title = f"{cluster['documents']:,} documents, {kind}{jaccard}"
            yield {"title": title, "kept": kept, "dropped": cluster["dropped"], "compare": kind == "near" and kept["begins"]}


def _splits(corpus: dict[str, Any]) -> Iterator[Any]:
    """The documents and MB of each split of a corpus."""
    for split in SPLITS:
        count = corpus.get(split, {"documents": 0, "bytes": 0})
        yield from (count["documents"], megabytes(count["bytes"]))


def _share_rows(entries: list[tuple[str, int, int]]) -> list[list[Any]]:
    """The rows of a table with one bar per row: (name, documents, weight)."""
    total = sum(weight for _, _, weight in entries)
    return [[name, documents, Bar(weight, total)] for name, documents, weight in entries]


def summary(totals: dict[str, Any]) -> str:
    """Format the totals that are not 0 for the log."""
    sizes = ((split, totals[split]) for split in SPLITS)
    parts = [f"{split} {n['documents']:,} documents, {n['bytes'] / 1e6:,.1f} MB, {n['shards']} shards" for split, n in sizes]
    for key, words in (
        ("empty_documents", "empty documents dropped"),
        ("bad_documents", "unreadable documents"),
        ("cleaned_documents", "documents dropped by cleaning"),
        ("skipped", "files or parts of files not read, see report.html"),  # older manifests do not count it
    ):
        parts += [f"{totals[key]:,} {words}"] if totals.get(key) else []
    if totals["exact_duplicates"] or totals["near_duplicates"]:
        parts.append(f"{totals['exact_duplicates']:,} exact and {totals['near_duplicates']:,} near duplicates dropped")
    if totals["repeated_documents"]:
        parts.append(f"{totals['repeated_documents']:,} documents dropped because all of their text is repeated")
    if "repeated_spans" in totals:
        parts.append("{spans:,} repeated spans removed from {documents:,} documents".format(**totals["repeated_spans"]))
    return "; ".join(parts)
