"""What a run was trained on by corpus, language, license, source and domain: counts of the documents it has read. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from pipeline.common.languages import UNKNOWN
from pipeline.data.load.ledger import DocumentLedger
from pipeline.data.shard.text_shards import language
from pipeline.training.lineage import Stretch

#: Fields of a document with the time of its collection or publication, the first one that is there.
DATES = ("date", "timestamp", "crawl_date", "fetch_time", "published", "created", "added")
#: Fields of a document with its license.
LICENSES = ("license", "licence")
#: The part of the domains, by size of their content, that the summary names.
RELEVANT_DOMAINS = 0.1

_MONTH = re.compile(r"(\d{4})-(\d{2})")


@dataclass
class Counts:
    """Documents that were read at least once, their text in bytes, their tokens, and the tokens that were read, each time counted."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    read: int = 0

    def add(self, size: int, tokens: int, read: int) -> None:
        """Count a document."""
        self.documents, self.bytes, self.tokens, self.read = self.documents + 1, self.bytes + size, self.tokens + tokens, self.read + read


@dataclass
class Content:
    """The training content of a run.

    Attributes:
        total: of all documents.
        by: "corpus", "language", "license", "source", "domain" -> value -> counts; "" for documents without the field.
        months: first and last month of the documents that tell it, as (year, month); None if none does.
        dated: documents that tell it.
        other: steps whose data are no documents: configuration key and files, by run directory.
        removed: documents that the run leaves out, and those of them that were read before.
    """

    total: Counts = field(default_factory=Counts)
    by: dict[str, dict[str, Counts]] = field(
        default_factory=lambda: {name: {} for name in ("corpus", "language", "license", "source", "domain")}
    )
    months: tuple[tuple[int, int], tuple[int, int]] | None = None
    dated: int = 0
    other: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    removed: tuple[int, int] = (0, 0)

    def relevant_domains(self) -> list[tuple[str, Counts]]:
        """Return the largest tenth of the domains, by bytes of text."""
        known = {name: counts for name, counts in self.by["domain"].items() if name}
        return sorted(known.items(), key=lambda item: (-item[1].bytes, item[0]))[: math.ceil(RELEVANT_DOMAINS * len(known))]

    def add(self, text: bytes, fields: Mapping[str, Any], tokens: int, read: int) -> None:
        """Count a document."""
        self.total.add(len(text), tokens, read)
        license_name = next((str(fields[name]) for name in LICENSES if fields.get(name)), "")
        values = {
            "corpus": str(fields.get("corpus") or ""),
            "language": "" if fields.get("lang") in (None, "", UNKNOWN) else language({"lang": fields["lang"]}),
            "license": license_name,
            "source": str(fields.get("source") or ""),
            "domain": domain(fields.get("url")),
        }
        for name, value in values.items():
            self.by[name].setdefault(value, Counts()).add(len(text), tokens, read)
        date = next((match for name in DATES if (match := _MONTH.match(str(fields.get(name) or "")))), None)
        if date is not None and 1 <= int(date[2]) <= 12:
            month = (int(date[1]), int(date[2]))
            first, last = self.months or (month, month)
            self.months, self.dated = (min(first, month), max(last, month)), self.dated + 1


def domain(url: Any) -> str:
    """Return the host of a URL without "www."; empty for what is none."""
    try:
        host = urlsplit(str(url or "")).hostname or ""
    except ValueError:
        return ""
    return host.removeprefix("www.")


def of(stretches: list[Stretch], shards: list[str]) -> Content:
    """Count what runs have read, in one pass over their text shards.

    Args:
        stretches: the steps of the runs.
        shards: folders of the text shards; data.shards of each run when empty.

    Raises:
        UserError: shards are not there any more.
    """
    content = Content()
    read: dict[str, np.ndarray] = {}
    places: dict[str, tuple[DocumentLedger, int]] = {}
    for stretch in stretches:
        if (ledger := stretch.ledger(shards)) is None:
            data = stretch.config.data.instructions
            content.other[str(stretch.run_dir)] = ("data.instructions", [data.tokens] if data.tokens else list(data.train))
            continue
        for shard, counts in _tokens_read(stretch, ledger):
            key = ledger.shards[shard].entry["xxh3"]
            read[key] = read.get(key, 0) + counts
            places[key] = (ledger, shard)
    for key, (ledger, shard) in places.items():
        if not read[key].any():
            continue
        tokens = ledger.tokens(shard)
        for document, (text, fields) in enumerate(ledger.metadata(shard)):
            if read[key][document]:
                content.add(text, fields, int(tokens[document]), int(read[key][document]))
    lines = stretches[-1].removed if stretches else []
    before = sum(bool(read[line["content"]][line["document"]]) for line in lines if line["content"] in read)
    content.removed = (len(lines), before)
    return content


def _tokens_read(stretch: Stretch, ledger: DocumentLedger) -> Iterator[tuple[int, np.ndarray]]:
    """Yield every shard with the tokens of each of its documents that the steps have read, (documents,) int64."""
    for shard, of_shard in enumerate(ledger.shards):
        documents = np.arange(len(ledger.tokens(shard)))
        rows, samples, tokens = ledger.samples_of(shard, documents, int(stretch.samples[-1]))
        when = stretch.steps(samples)
        rows, tokens, when = rows[when > 0], tokens[when > 0], when[when > 0]
        kept = ~stretch.leaves_out(of_shard.entry["xxh3"], documents, rows, when)
        yield shard, np.bincount(rows[kept], tokens[kept], len(documents)).astype(np.int64)
