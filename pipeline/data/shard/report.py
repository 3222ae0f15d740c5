"""The report of the shard stage: input, effect of every step with reasons, output; as JSON and as an HTML page.

report.json depends neither on the number of ranks nor on the time of the run; the page also shows the date.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator
from typing import Any

import orjson

from pipeline.common.page import Raw, bar, details, difference, settings, share, table, whole_page
from pipeline.data.clean.cleaner import StepCounts
from pipeline.data.dedup.clusters import Cluster, Clusters
from pipeline.data.shard.process_part import PartCounts
from pipeline.data.shard.shuffle import SPLITS
from pipeline.data.shard.spilled_documents import Pool

EXCERPT = 300
WARN_SHARE = 0.5
"""The page warns of a corpus that loses this share of its documents or of its text."""
LISTED_BAD = 100
SHOWN_CLUSTERS = 20
"""Clusters of each kind on the HTML page; report.json lists more."""

_BAD = ("file", "position", "reason", "lost_bytes")


def build(counts: PartCounts, found: Clusters, pool: Pool, output: dict[str, Any], made_with: dict[str, Any]) -> dict[str, Any]:
    """Build the report as a JSON object.

    Args:
        output: content of the shards: totals, languages and lengths.
        made_with: the settings of the run.
    """
    written = output["corpora"]
    return {
        "settings": made_with,
        "kept": {
            name: [sum(written[name][split][field] for split in SPLITS) if name in written else 0 for field in ("documents", "bytes")]
            for name in counts.read
        },
        "lost": counts.lost,
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
            "repeated": output.pop("repeated_documents"),
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
        "removed": dict(sorted(counts.removed.items())),
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


def quarantine(bad: list[list[Any]]) -> bytes:
    """The content of quarantine.jsonl: all unreadable input."""
    return b"".join(orjson.dumps(dict(zip(_BAD, entry, strict=True))) + b"\n" for entry in sorted(bad))


def page(report: dict[str, Any]) -> str:
    """The content of report.html: one self-contained HTML page. It differs between equal runs only in the date."""
    output, source = report["output"], report["input"]
    parts = [
        _verdict(report),
        "<h2>What was dropped, by corpus</h2>",
        _lost(report),
        "<h2>Documents per step</h2>",
        _flow(report),
        "<h2>Cleaning steps</h2>",
        "<p class=soft>Examples are excerpts. <del>Removed</del> and <ins>added</ins> characters are highlighted.</p>",
        *map(_step_section, report["steps"]),
        "<h2>Duplicates</h2>",
        _duplicates(report["duplicates"]),
        "<h2>Corpora</h2>",
        table(
            ["corpus", "documents read", "MB read", "training", "MB training", "validation", "MB validation"],
            [
                [name, documents, _mb(size), *_splits(output["corpora"].get(name, {}))]
                for name, (documents, size) in sorted(source["corpora"].items())
            ],
        ),
        "<h2>Languages</h2>",
        _bars("language", [(code or "unknown", n, size) for code, (n, size) in output["languages"].items()], "share of text"),
        "<h2>Lengths</h2>",
        _bars(
            "bytes per document",
            [(f"{1 << int(bit):,} to {(2 << int(bit)) - 1:,}", n, n) for bit, n in output["lengths"].items()],
            "share of documents",
        ),
        "<h2>Unreadable input</h2>",
        _quarantined(report),
    ]
    return whole_page("Data report", parts)


def _verdict(report: dict[str, Any]) -> str:
    """What was kept, the corpora that lose more than WARN_SHARE, and the settings."""
    source, kept = report["input"], report["kept"]
    documents, size = (sum(entry[field] for entry in kept.values()) for field in (0, 1))
    lines = [
        f"<div class=verdict><b>{share(documents, source['documents'])} of {source['documents']:,} documents kept</b>"
        f"<p>{documents:,} documents with {_mb(size)} of {_mb(source['bytes'])} MB of text ({share(size, source['bytes'])}). "
        f"{source['empty_documents']:,} further documents were empty, {source['bad_documents']:,} could not be read.</p>",
        settings(report["settings"]),
        "</div>",
    ]
    for name, (read, read_bytes) in sorted(source["corpora"].items()):
        left, left_bytes = kept[name]
        if read and min(left / read, left_bytes / max(1, read_bytes)) <= 1 - WARN_SHARE:
            reasons = sorted(report["lost"].get(name, {}).items(), key=lambda entry: (-entry[1][0], entry[0]))[:3]
            most = ", ".join(f"{html.escape(reason)} ({share(lost, read)})" for reason, (lost, _) in reasons)
            what = f"<b>{html.escape(name)}</b> keeps {share(left, read)} of its documents and {share(left_bytes, read_bytes)} of its text"
            lines.append(
                f"<div class=warning>{what}. Most were dropped by {most or 'changes of the text'}: look at the examples below.</div>"
            )
    return "\n".join(lines)


def _lost(report: dict[str, Any]) -> str:
    """For every corpus, the share that is kept, and the reasons for the remainder."""
    rows: list[list[Any]] = []
    for name, (read, read_bytes) in sorted(report["input"]["corpora"].items()):
        left, left_bytes = report["kept"][name]
        rows.append([Raw(f"<b>{html.escape(name)}: kept</b>"), left, _mb(left_bytes), bar(left, read)])
        reasons = sorted(report["lost"].get(name, {}).items(), key=lambda entry: (-entry[1][0], entry[0]))
        rows += [[f"{name}: {reason}", lost, _mb(size), bar(lost, read)] for reason, (lost, size) in reasons]
        removed = read_bytes - left_bytes - sum(size for _, size in report["lost"].get(name, {}).values())
        rows.append([f"{name}: removed from kept documents", "", _mb(removed), ""])
    return table(["", "documents", "MB", "share of documents"], rows)


def _flow(report: dict[str, Any]) -> str:
    """A table of the documents and bytes of every step."""
    source, output = report["input"], report["output"]
    rows: list[list[Any]] = [["read", source["documents"], _mb(source["bytes"]), "", "", ""]]
    for step in report["steps"]:
        lost = sum(entry["documents"] for entry in step["dropped"].values())
        changed, removed = sum(step["changed"].values()), sum(step["removed"].values())
        size = _mb(step["bytes"])
        rows.append([f"input of {step['step']}", step["documents"], size, lost or "", changed or "", f"{removed:,}" if changed else ""])
    found = report["duplicates"]
    dropped = found["exact"] + found["near"] + found["repeated"]
    kept = sum(part["documents"] for part in (output["train"], output["validation"]))
    rows.append(["input of deduplication", kept + dropped, "", dropped or "", "", ""])
    rows.append(["written", kept, _mb(output["train"]["bytes"] + output["validation"]["bytes"]), "", "", ""])
    return table(["", "documents", "MB", "dropped", "changed", "bytes removed by changes"], rows)


def _step_section(step: dict[str, Any]) -> str:
    """The documents that a step dropped and changed, by reason, with expandable examples."""
    rows = [(reason, entry["documents"], f"{_mb(entry['bytes'])} MB dropped") for reason, entry in step["dropped"].items()]
    rows += [(reason, entry["documents"], f"{_mb(entry['bytes'])} MB tagged") for reason, entry in step["tagged"].items()]
    for reason, number in step["changed"].items():
        size = step["removed"].get(reason, 0)
        rows.append((reason, number, f"changed, {abs(size):,} bytes {'removed' if size >= 0 else 'added'}"))
    name = html.escape(step["step"])
    if not rows:
        return f"<p><b>{name}</b>: no documents dropped, tagged or changed</p>"
    sections = [f"<p><b>{name}</b></p>"]
    for reason, number, what in rows:
        examples = "".join(f"<div class=soft>{html.escape(one['id'])}</div>{_example(one)}" for one in step["examples"].get(reason, []))
        sections.append(details(f"{html.escape(reason)}: {_documents(number)}, {what}", examples))
    return "\n".join(sections)


def _example(example: dict[str, Any]) -> str:
    """The excerpt of a dropped document, or the difference that a change made."""
    before, after = example["before"], example["after"]
    return f"<pre>{html.escape(before)}</pre>" if after is None else difference(before, after, EXCERPT)


def _documents(number: int) -> str:
    return "1 document" if number == 1 else f"{number:,} documents"


def _duplicates(found: dict[str, Any]) -> str:
    """The numbers of duplicates, the distribution of cluster sizes, and the largest clusters."""
    parts = [f"<p>{found['exact']:,} exact and {found['near']:,} near duplicates were dropped.</p>"]
    if found["repeated"]:
        parts.append(f"<p>{_documents(found['repeated'])} had only lines that occur elsewhere.</p>")
    if found["cluster_sizes"]:
        parts.append(table(["documents per cluster", "clusters"], [[int(size), n] for size, n in found["cluster_sizes"].items()]))
    shown = [[cluster for cluster in found["clusters"] if cluster["kind"] == kind][:SHOWN_CLUSTERS] for kind in ("near", "exact")]
    for cluster in itertools.chain(*shown):
        kept = cluster["kept"] or {"id": "a document of another corpus", "begins": ""}
        similarity = (
            ""
            if cluster["kind"] == "exact"
            else ", Jaccard index " + " to ".join(f"{j:.2f}" for j in sorted({cluster["jaccard"][0], cluster["jaccard"][-1]}))
        )
        texts = [f"<div class=soft>kept {html.escape(kept['id'])}</div><pre>{html.escape(kept['begins'])}</pre>"]
        for document in cluster["dropped"]:
            content = difference(kept["begins"], document["begins"], EXCERPT) if cluster["kind"] == "near" and kept["begins"] else ""
            texts.append(f"<div class=soft>dropped {html.escape(document['id'])}</div>{content}")
        parts.append(details(f"{cluster['documents']:,} documents, {cluster['kind']}{similarity}", "".join(texts)))
    return "\n".join(parts)


def _quarantined(report: dict[str, Any]) -> str:
    """A table of the unreadable input."""
    total = report["input"]["bad_documents"]
    if not total:
        return "<p>All input was read.</p>"
    rows = [[bad["file"], bad["position"], bad["reason"], bad["lost_bytes"] or ""] for bad in report["bad"]]
    more = f"<p>The first {len(rows)} of {total:,}; quarantine.jsonl lists all of them.</p>" if total > len(rows) else ""
    return table(["file", "position", "reason", "bytes lost"], rows) + more


def _splits(corpus: dict[str, Any]) -> Iterator[Any]:
    for split in SPLITS:
        count = corpus.get(split, {"documents": 0, "bytes": 0})
        yield from (count["documents"], _mb(count["bytes"]))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}" if abs(size) >= 1e6 else f"{size / 1e6:.3g}"


def _bars(name: str, rows: list[tuple[str, int, int]], what: str) -> str:
    """A table with one bar per row: (name, documents, weight)."""
    total = sum(weight for _, _, weight in rows)
    return table([name, "documents", what], [[label, documents, bar(weight, total)] for label, documents, weight in rows])


def summary(totals: dict[str, Any]) -> str:
    """Format the totals for the log."""
    return "; ".join(_summary_parts(totals))


def _summary_parts(totals: dict[str, Any]) -> Iterator[str]:
    """Yield the non-empty counts of the summary."""
    for split in ("train", "validation"):
        count = totals[split]
        yield f"{split} {count['documents']:,} documents, {count['bytes'] / 1e6:,.1f} MB, {count['shards']} shards"
    for what, words in (
        ("empty", "empty documents dropped"),
        ("bad", "unreadable documents"),
        ("cleaned", "documents dropped by cleaning"),
    ):
        if totals[f"{what}_documents"]:
            yield f"{totals[f'{what}_documents']:,} {words}"
    if totals["exact_duplicates"] or totals["near_duplicates"]:
        yield f"{totals['exact_duplicates']:,} exact and {totals['near_duplicates']:,} near duplicates dropped"
    if totals["repeated_documents"]:
        yield f"{totals['repeated_documents']:,} documents dropped because all of their lines are repeated"
