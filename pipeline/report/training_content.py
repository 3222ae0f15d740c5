"""The public summary of the training content of a model: which question stands where, and what a run can answer.

The order is that of the template of the European Commission, C(2025) 8311 of 5 December 2025, for Article 53(1)(d) of Regulation (EU)
2024/1689. A file of a run cannot tell who a provider is, or under which right a text was used: these answers are blanks. What the run can
tell stands where it belongs, also under questions that a person must complete.
"""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData

from pipeline.common.atomic_files import atomic_file, make_folder
from pipeline.training import content, lineage
from pipeline.training.content import Content, Counts
from pipeline.training.lineage import Stretch

TEMPLATE = "C(2025) 8311"
BLANK = "_(to be answered by the provider)_"

#: Ranges of text in tokens, as the template has them.
RANGES = ((10**9, "less than 1 billion tokens"), (10**13, "1 billion to 10 trillion tokens"), (None, "more than 10 trillion tokens"))

#: Number and title of each section, and its questions; the first word of a question is the key of its answer.
SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("", "Version", ("version Version of the summary", "updated Last update")),
    ("1", "General information", ()),
    (
        "1.1",
        "Provider identification",
        ("provider Provider name and contact details", "representative Authorised representative, and contact"),
    ),
    ("1.2", "Model identification", ("model Versioned model names", "parent Model dependencies", "placed Placed on the Union market on")),
    (
        "1.3",
        "Modalities, overall size of the training data and other characteristics",
        (
            "size Text: size of the training data",
            "types Text: types of content",
            "latest Latest date of data collection",
            "continued Is the model trained on new data after this date?",
            "languages Linguistic characteristics",
            "characteristics Other characteristics",
            "comments_1 Additional comments (optional)",
        ),
    ),
    ("2", "List of data sources", ("sources Sources of this run, for the sections below",)),
    (
        "2.1",
        "Publicly available datasets",
        (
            "public Were they used?",
            "public_large Large datasets",
            "public_other Description of the others",
            "comments_2_1 Comments (optional)",
        ),
    ),
    ("2.2", "Private datasets obtained from third parties", ()),
    ("2.2.1", "Datasets licensed by rightsholders", ("licensed Were licenses concluded?", "licenses Licenses that the documents name")),
    (
        "2.2.2",
        "Other private datasets of third parties",
        ("private Were they used?", "private_known Publicly known datasets", "private_other Description of the others"),
    ),
    (
        "2.3",
        "Data crawled and scraped from online sources",
        (
            "crawled Were crawlers used?",
            "crawlers Names, purposes and behavior of the crawlers",
            "period Period of collection",
            "online Description of the content and of the online sources",
            "domains Most relevant domain names",
            "comments_2_3 Comments (optional)",
        ),
    ),
    ("2.4", "User data", ("user Were interactions with the model, or other services, used?", "services Which services?")),
    ("2.5", "Synthetic data", ("synthetic Was it used?", "generators Models that generated it")),
    ("2.6", "Other sources", ("other Were other sources used? Describe them",)),
    ("3", "Aspects of data processing", ()),
    ("3.1", "Respect of reservations of rights from text and data mining", ("reservations Measures before and during collection",)),
    ("3.2", "Removal of illegal content", ("illegal Measures",)),
    ("3.3", "Other information (optional)", ("processing Steps of processing", "removed Documents removed on request")),
)


#: Rows of a table of the Markdown file; the JSON file has all.
SHOWN = 30


def write(folder: Path, run_dir: Path, shards: list[str]) -> Content:
    """Write training-content.md, training-content.json, domains.csv and a data card, and return the counts.

    Args:
        shards: folders of its text shards; data.shards of the run when empty.

    Raises:
        UserError: the run or its shards cannot be read.
    """
    make_folder(folder, "stage.summary")
    gaps: list[str] = []
    stretches = lineage.read(run_dir, gaps=gaps)
    counted = content.of(stretches, shards)
    filled = sections(answers_of(counted, stretches, [Path(path) for path in shards or [stretches[-1].config.data.shards]], gaps))
    with atomic_file(folder / "domains.csv", "w") as handle:
        rows = csv.writer(handle)
        rows.writerow(["domain", "documents", "bytes", "tokens"])
        rows.writerows([name, counts.documents, counts.bytes, counts.tokens] for name, counts in counted.relevant_domains())
    with atomic_file(folder / "training-content.json", "w") as handle:
        json.dump({"template": TEMPLATE, "sections": filled, "counts": asdict(counted)}, handle, indent=1)
    with atomic_file(folder / "training-content.md", "w") as handle:
        handle.writelines(line + "\n" for line in markdown(filled))
    languages = sorted(name for name in counted.by["language"] if name)
    card = DatasetCardData(pretty_name=f"Training content of {run_dir.name}", language=languages or None)
    with atomic_file(folder / "README.md", "w") as handle:  # the data card of the Hugging Face Hub
        handle.write("\n".join(("---", card.to_yaml(), "---", "", *markdown(filled), "")))
    return counted


def answers_of(counted: Content, stretches: Sequence[Stretch], shards: Sequence[Path], gaps: Sequence[str]) -> dict[str, list[str]]:
    """Return what a run can answer, by the key of the question.

    Args:
        stretches: its steps, and those of the runs that it began with.
        shards: folders of its text shards.
        gaps: what the weights have learned from besides, as of lineage.read.
    """
    total, model = counted.total, stretches[-1].config.model
    answers = {
        "updated": [datetime.datetime.now(datetime.UTC).date().isoformat()],
        "model": [f"{stretches[-1].run_dir.name}, of the family {model.family}, step {stretches[-1].last:,} _(complete this)_"],
        "size": [
            f"{size_range(total.tokens)}: {total.tokens:,} tokens of {total.documents:,} documents, {total.bytes:,} bytes of text; "
            f"{total.read:,} tokens were read, {total.read / max(total.tokens, 1):.2f} times each"
        ],
        "types": _shares("corpus", counted),
        "languages": _shares("language", counted),
        "sources": _shares("source", counted),
        "licenses": _shares("license", counted),
        "domains": [
            f"The largest tenth of the domains by size of their text, {len(counted.relevant_domains()):,} of "
            f"{len([name for name in counted.by['domain'] if name]):,}, is in domains.csv. The first of them:",
            "",
            *table(["domain", "documents", "bytes"], [(n, c.documents, c.bytes) for n, c in counted.relevant_domains()[:SHOWN]]),
        ],
        "processing": _processing(shards),
    }
    origins = [f"{stretch.run_dir}, up to step {stretch.last:,}" for stretch in stretches[:-1]]
    if origins := [*origins, *(f"{gap}, of which nothing is counted here" for gap in gaps)]:
        answers["parent"] = [f"began with the weights of {'; '.join(origins)}"]
    if counted.months is not None:
        (first_year, first), (last_year, last) = counted.months
        dated = f"of the {counted.dated:,} documents that tell a date"
        answers["latest"] = [f"{last:02d}/{last_year}, {dated}"]
        answers["period"] = [f"{first:02d}/{first_year} to {last:02d}/{last_year}, {dated} _(complete this)_"]
    if counted.other:
        answers["characteristics"] = [f"{run}: {key}={', '.join(files)}" for run, (key, files) in counted.other.items()]
    if counted.removed[0]:
        removed, before = counted.removed
        answers["removed"] = [f"{removed:,} documents were removed from the run, {before:,} of them after the model had read them"]
    return answers


def _shares(name: str, counted: Content) -> list[str]:
    """The counts of a field as a table, the largest first."""
    rows: list[tuple[str, Counts]] = sorted(counted.by[name].items(), key=lambda item: -item[1].bytes)
    total = max(counted.total.bytes, 1)
    lines = table(
        [name, "documents", "bytes", "share", "tokens"],
        [(value or "not stated", c.documents, c.bytes, f"{100 * c.bytes / total:.2f} %", c.tokens) for value, c in rows[:SHOWN]],
    )
    return [*lines, *([f"and {len(rows) - SHOWN:,} more, in training-content.json"] if len(rows) > SHOWN else [])]


def _processing(shards: Sequence[Path]) -> list[str]:
    """The steps of cleaning and deduplication, with what they dropped, from the reports of stage=shard."""
    rows = []
    for folder in shards:
        path = folder / "report.json"
        report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"steps": [], "duplicates": {}}
        for step in report["steps"]:
            dropped = ", ".join(f"{reason} {counts['documents']:,}" for reason, counts in step["dropped"].items())
            rows.append((str(folder), step["step"], step["documents"], dropped or "none"))
        duplicates = {kind: report["duplicates"].get(kind, 0) for kind in ("exact", "near")}
        rows += [(str(folder), f"{kind} duplicates", "", f"{number:,}") for kind, number in duplicates.items() if number]
    return table(["text shards", "step", "documents read", "dropped, by reason"], rows) if rows else []


def sections(answers: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return the template with answers.

    Args:
        answers: key of a question -> lines; a question without is a blank, None.
    """
    filled, used = [], set()
    for number, title, questions in SECTIONS:
        entries = []
        for question in questions:
            key, _, text = question.partition(" ")
            used.add(key)
            entries.append({"key": key, "question": text, "answer": list(answers[key]) if answers.get(key) else None})
        filled.append({"number": number, "title": title, "questions": entries})
    assert set(answers) <= used, set(answers) - used
    return filled


def markdown(filled: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a document."""
    yield "# Public summary of the training content"
    yield ""
    yield f"For Article 53(1)(d) of Regulation (EU) 2024/1689, in the order of the template {TEMPLATE}."
    for section in filled:
        number = section["number"]
        yield ""
        yield f"{'#' * (2 + number.count('.'))} {number} {section['title']}".replace("  ", " ")
        for entry in section["questions"]:
            yield ""
            yield f"**{entry['question']}**"
            yield ""
            yield from entry["answer"] or [BLANK]


def size_range(tokens: int) -> str:
    """Return the range of the template for a number of tokens."""
    return next(text for limit, text in RANGES if limit is None or tokens < limit)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table; numbers have separators."""

    def cell(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")

    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows)]
