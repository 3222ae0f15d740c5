"""The report of the shard stage: input, effect of every step with reasons, output; as JSON and as an HTML page.

Neither depends on the number of ranks or on the time of the run.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from pipeline.data.clean.cleaner import StepCounts
from pipeline.data.dedup.clusters import Cluster, Clusters
from pipeline.data.shard.part import PartCounts
from pipeline.data.shard.pool import Pool
from pipeline.data.shard.shuffle import SPLITS

EXCERPT = 300
LISTED_BAD = 100
SHOWN_CLUSTERS = 20
"""Clusters of each kind on the HTML page; report.json lists more."""

_BAD = ("file", "position", "reason")


def build(counts: PartCounts, found: Clusters, pool: Pool, output: dict[str, Any]) -> dict[str, Any]:
    """Build the report as a JSON object.

    Args:
        output: content of the shards: totals, languages and lengths.
    """
    return {
        "input": {
            "documents": counts.documents,
            "bytes": counts.bytes,
            "empty_documents": counts.empty,
            "bad_documents": len(counts.bad),
            "corpora": counts.read,
        },
        "bad": [dict(zip(_BAD, bad, strict=True)) for bad in sorted(counts.bad)[:LISTED_BAD]],
        "steps": [{"step": name, **_step(step)} for name, step in counts.steps.items()],
        "duplicates": {
            "exact": found.exact,
            "near": found.near,
            "cluster_sizes": {str(size): number for size, number in sorted(found.sizes.items())},
            "clusters": [_cluster(cluster, pool) for cluster in found.clusters],
        },
        "output": output,
    }


def _step(counts: StepCounts) -> dict[str, Any]:
    """The report entry of a cleaning step."""
    examples = {
        reason: [{"id": identity, "before": before, "after": after} for _, identity, before, after in shown]
        for reason, shown in sorted(counts.examples.items())
    }
    return {
        "documents": counts.documents,
        "bytes": counts.bytes,
        "dropped": {reason: {"documents": n, "bytes": size} for reason, (n, size) in sorted(counts.dropped.items())},
        "tagged": {reason: {"documents": n, "bytes": size} for reason, (n, size) in sorted(counts.tagged.items())},
        "changed": dict(sorted(counts.changed.items())),
        "examples": examples,
    }


def _cluster(cluster: Cluster, pool: Pool) -> dict[str, Any]:
    """The report entry of a cluster of duplicates, with excerpts of at most five dropped documents."""

    def document(number: int) -> dict[str, Any]:
        meta, text = pool.record(number)
        return {"id": orjson.loads(meta)["id"], "begins": text[: 4 * EXCERPT].decode("utf-8", "ignore")[:EXCERPT]}

    return {
        "kind": cluster.kind,
        "documents": cluster.size,
        "kept": None if cluster.kept is None else document(cluster.kept),
        "dropped": [document(number) for number in cluster.dropped[:5]],
        "jaccard": sorted({round(jaccard, 3) for _, _, jaccard in cluster.edges}),
    }


def as_json(report: dict[str, Any]) -> bytes:
    """The content of report.json."""
    return orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n"


def quarantine(bad: list[list[str]]) -> bytes:
    """The content of quarantine.jsonl: all unreadable input."""
    return b"".join(orjson.dumps(dict(zip(_BAD, entry, strict=True))) + b"\n" for entry in sorted(bad))


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; margin: .6rem 0 } th, td { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }
th { font-weight: 600; border-bottom: 1px solid #999 } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.bar { display: inline-block; height: .75rem; background: #3a7d44; vertical-align: middle } summary { cursor: pointer; color: #25552d }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f2; padding: .5rem .7rem; margin: .3rem 0; font-size: 13px }
.id { color: #666; font-size: 13px; overflow-wrap: anywhere }
"""


def page(report: dict[str, Any]) -> str:
    """The content of report.html: one self-contained HTML page."""
    output, source = report["output"], report["input"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Data report</title>",
        f"<style>{_STYLE}</style><h1>Data report</h1>",
        "<h2>Documents per step</h2>",
        _flow(report),
        "<h2>Corpora</h2>",
        _table(
            ["corpus", "documents read", "MB", "training", "MB", "validation", "MB"],
            [
                [name, documents, _mb(size), *_splits(output["corpora"].get(name, {}))]
                for name, (documents, size) in sorted(source["corpora"].items())
            ],
        ),
        "<h2>Languages</h2>",
        _bars(
            ["language", "documents", "MB", "share of text"],
            [(code or "unknown", n, size) for code, (n, size) in output["languages"].items()],
        ),
        "<h2>Lengths</h2>",
        _bars(
            ["bytes per document", "documents", "", "share of documents"],
            [(f"{1 << int(bit):,} to {(2 << int(bit)) - 1:,}", n, n) for bit, n in output["lengths"].items()],
            megabytes=False,
        ),
        "<h2>Cleaning steps</h2>",
        *map(_step_section, report["steps"]),
        "<h2>Duplicates</h2>",
        _duplicates(report["duplicates"]),
        "<h2>Quarantine</h2>",
        _quarantined(report),
    ]
    return "\n".join(parts) + "\n"


def _flow(report: dict[str, Any]) -> str:
    """A table of the documents and bytes of every step."""
    source, output = report["input"], report["output"]
    rows: list[list[Any]] = [["read", source["documents"], _mb(source["bytes"]), "", ""]]
    for step in report["steps"]:
        removed = sum(entry["documents"] for entry in step["dropped"].values())
        changed = sum(step["changed"].values())
        rows.append([f"input of {step['step']}", step["documents"], _mb(step["bytes"]), removed or "", changed or ""])
    dropped = report["duplicates"]["exact"] + report["duplicates"]["near"]
    kept = sum(part["documents"] for part in (output["train"], output["validation"]))
    rows.append(["input of deduplication", kept + dropped, "", dropped or "", ""])
    rows.append(["written", kept, _mb(output["train"]["bytes"] + output["validation"]["bytes"]), "", ""])
    return _table(["", "documents", "MB", "dropped", "changed"], rows)


def _step_section(step: dict[str, Any]) -> str:
    """The documents that a step dropped and changed, by reason, with expandable examples."""
    rows = [(reason, entry["documents"], f"{_mb(entry['bytes'])} MB dropped") for reason, entry in step["dropped"].items()]
    rows += [(reason, entry["documents"], f"{_mb(entry['bytes'])} MB tagged") for reason, entry in step["tagged"].items()]
    rows += [(reason, number, "changed") for reason, number in step["changed"].items()]
    if not rows:
        return f"<p><b>{html.escape(step['step'])}</b>: no documents dropped, tagged or changed</p>"
    sections = [f"<p><b>{html.escape(step['step'])}</b></p>"]
    for reason, number, what in rows:
        shown = "".join(
            f"<div class=id>{html.escape(example['id'])}</div><pre>{html.escape(example['before'])}</pre>"
            + (f"after<pre>{html.escape(example['after'])}</pre>" if example["after"] is not None else "")
            for example in step["examples"].get(reason, [])
        )
        documents = "1 document" if number == 1 else f"{number:,} documents"
        sections.append(f"<details><summary>{html.escape(reason)}: {documents}, {what}</summary>{shown}</details>")
    return "\n".join(sections)


def _duplicates(found: dict[str, Any]) -> str:
    """The numbers of duplicates, the distribution of cluster sizes, and the largest clusters."""
    parts = [f"<p>{found['exact']:,} exact and {found['near']:,} near duplicates were dropped.</p>"]
    if found["cluster_sizes"]:
        parts.append(_table(["documents per cluster", "clusters"], [[int(size), n] for size, n in found["cluster_sizes"].items()]))
    shown = [[cluster for cluster in found["clusters"] if cluster["kind"] == kind][:SHOWN_CLUSTERS] for kind in ("near", "exact")]
    for cluster in itertools.chain(*shown):
        kept = cluster["kept"] or {"id": "a document of another corpus", "begins": ""}
        similarity = (
            ""
            if cluster["kind"] == "exact"
            else ", Jaccard index " + " to ".join(f"{j:.2f}" for j in sorted({cluster["jaccard"][0], cluster["jaccard"][-1]}))
        )
        texts = "".join(
            f"<div class=id>{word} {html.escape(document['id'])}</div><pre>{html.escape(document['begins'])}</pre>"
            for word, document in [("kept", kept), *(("dropped", document) for document in cluster["dropped"])]
        )
        parts.append(f"<details><summary>{cluster['documents']:,} documents, {cluster['kind']}{similarity}</summary>{texts}</details>")
    return "\n".join(parts)


def _quarantined(report: dict[str, Any]) -> str:
    """A table of the unreadable input."""
    total = report["input"]["bad_documents"]
    if not total:
        return "<p>All input was read.</p>"
    rows = [[bad["file"], bad["position"], bad["reason"]] for bad in report["bad"]]
    more = f"<p>The first {len(rows)} of {total:,}; quarantine.jsonl lists all of them.</p>" if total > len(rows) else ""
    return _table(list(_BAD), rows) + more


def _splits(corpus: dict[str, Any]) -> Iterator[Any]:
    for split in SPLITS:
        count = corpus.get(split, {"documents": 0, "bytes": 0})
        yield from (count["documents"], _mb(count["bytes"]))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _bars(head: list[str], rows: Iterable[tuple[str, int, int]], megabytes: bool = True) -> str:
    """A table with one bar per row: (name, documents, length of the bar)."""
    listed = list(rows)
    total = max(1, sum(weight for _, _, weight in listed))
    cells = []
    for name, documents, weight in listed:
        bar = f'<span class=bar style="width:{300 * weight / total:.1f}px"></span> {100 * weight / total:.1f} %'
        cells.append([name, documents, _mb(weight) if megabytes else "", _Raw(bar)])
    return _table(head, cells)


class _Raw(str):
    """Text that is already HTML."""


def _table(head: list[str], rows: list[list[Any]]) -> str:
    """An HTML table; columns with numbers are right-aligned."""

    def number(value: Any) -> bool:
        return isinstance(value, int) or value.replace(",", "").replace(".", "").isdigit()

    def cell(value: Any, tag: str, right: bool) -> str:
        text = value if isinstance(value, _Raw) else html.escape(f"{value:,}" if isinstance(value, int) else str(value))
        return f"<{tag} class=n>{text}</{tag}>" if right else f"<{tag}>{text}</{tag}>"

    right = [any(number(row[column]) for row in rows) for column in range(len(head))]
    lines = ["<tr>" + "".join(cell(value, "td", side) for value, side in zip(row, right, strict=True)) + "</tr>" for row in rows]
    titles = "".join(cell(title, "th", side) for title, side in zip(head, right, strict=True))
    return f"<table><tr>{titles}</tr>" + "\n".join(lines) + "</table>"
