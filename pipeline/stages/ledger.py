"""ledger: which documents a step has read, or which steps have read a document, from a run directory and its shards. Requires no GPU."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipeline.checkpoint import native
from pipeline.common import events
from pipeline.common.atomic_files import atomic_file, make_folder
from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.common.texts import table_lines
from pipeline.config import phases
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Ledger as LedgerConfig
from pipeline.data.load import removal
from pipeline.data.load.ledger import DocumentLedger, DocumentQuery
from pipeline.report import training_content
from pipeline.training import lineage, removal_certificate
from pipeline.training.lineage import Stretch

log = logging.getLogger("pipeline")

#: Documents that are printed; stage.out has all.
SHOWN = 25
#: Documents of which the steps are computed at once: ten million samples take half a gigabyte otherwise.
AT_ONCE = 1 << 16
#: Keys that choose documents.
QUESTIONS = ("where", "ids", "contains")
#: Fields of a document that are printed, as far as it has them.
FIELDS = ("id", "url", "license")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Print the documents of stage.step, or the steps of the documents that the other keys choose.

    Raises:
        UserError: the run or its shards cannot be read, or no question is asked.
    """
    stage = config.stage
    assert isinstance(stage, LedgerConfig)
    if ranks.rank > 0:
        return  # additional ranks do nothing
    if stage.out:
        make_folder(Path(stage.out).parent, "stage.out")
    if stage.certificate:
        make_folder(Path(stage.certificate).parent, "stage.certificate")
    if stage.summary:
        _refuse(stage, ("step", *QUESTIONS, "out", "certificate"), "stage.summary, which is about all documents")
        counted = training_content.write(Path(stage.summary), Path(config.run_dir), stage.shards)
        print(f"{counted.total.documents:,} documents with {counted.total.tokens:,} tokens were read: {stage.summary}/training-content.md")
        return
    checkpoint = removal_certificate.checkpoint_of(Path(config.run_dir), stage.step) if stage.certificate else None
    gaps: list[str] = []
    stretches = lineage.read(Path(config.run_dir), last=None if checkpoint is None else native.step_of(checkpoint), gaps=gaps)
    rows: Iterable[dict[str, Any]]
    rows = _documents_of_step(stretches, stage) if stage.step and checkpoint is None else _steps_of_documents(stretches, stage)
    if stage.certificate and checkpoint:
        rows = listed = list(rows)
        question = {name: getattr(stage, name) for name in QUESTIONS}
        question |= {} if any(question.values()) else {"documents": "all that were removed"}
        ledger = stretches[-1].ledger(stage.shards)
        text = removal_certificate.write(Path(stage.certificate), checkpoint, question, stretches, listed, ledger, gaps)
        print(f"{text}\n{stage.certificate}\n")
    shown: list[dict[str, Any]] = []
    with nullcontext() if stage.out is None else atomic_file(Path(stage.out), "wb") as handle:
        for row in rows:
            if len(shown) < SHOWN:
                shown.append(row)
            elif handle is None:
                break
            if handle is not None:
                handle.write(orjson.dumps(row) + b"\n")
    print("\n".join(_table(shown)))
    if stage.out:
        print(f"\n{stage.out}")


def _refuse(stage: LedgerConfig, names: Iterable[str], other: str) -> None:
    """Refuse keys of the stage that another one makes it ignore."""
    for name in names:
        if value := getattr(stage, name):
            raise UserError.of(f"stage.{name}", value, f"has no effect with {other}", "remove one")


def _documents_of_step(stretches: list[Stretch], stage: LedgerConfig) -> Iterator[dict[str, Any]]:
    """Yield the documents of a step in their order, and print how many they are.

    Raises:
        UserError: the run has not made this step, or the rank is not one of the job that made it.
    """
    step = stage.step or 0
    _refuse(stage, QUESTIONS, f"stage.step={step}, which prints all documents")
    if stage.micro_batch is not None and stage.rank is None:
        raise UserError.of("stage.micro_batch", stage.micro_batch, "is one of a rank", "set stage.rank")
    stretch = next((candidate for candidate in reversed(stretches) if candidate.before < step <= candidate.last), None)
    if stretch is None:
        rule = f"was not made: the steps of {stretches[-1].run_dir} are {stretches[0].before + 1} to {stretches[-1].last}"
        raise UserError.of("stage.step", step, rule, "choose one of them")
    numbers, head = stretch.numbers(step), f"step {step} of {stretch.run_dir}"
    if stage.rank is not None:
        numbers = _share(stretch, step, numbers, stage)
        head += f", rank {stage.rank}" + ("" if stage.micro_batch is None else f", micro-batch {stage.micro_batch}")
    if (ledger := stretch.ledger(stage.shards)) is None:
        return
    parts = ledger.documents(numbers)
    if out := {removal.identity(line) for line in stretch.left_out(step)}:
        parts = parts[:, [(ledger.shards[shard].entry["xxh3"], document) not in out for shard, document in parts[1:3].T.tolist()]]
    keys, first = np.unique(parts[1] << 32 | parts[2], return_index=True)
    print(f"{head}: {len(numbers):,} samples, {int(parts[3].sum()):,} tokens, {len(keys):,} documents\n")
    fields = _fields(ledger, parts[1:3, np.sort(first)[: None if stage.out else SHOWN]])
    for row, shard, document, tokens in parts.T.tolist():
        yield {**fields.get((shard, document), {}), "sample": int(numbers[row]), **ledger.place(shard, document), "read": tokens}


def _fields(ledger: DocumentLedger, documents: np.ndarray) -> dict[tuple[int, int], dict[str, Any]]:
    """The metadata of documents by (shard, document), of which `documents` (2, n) has pairs; empty with a warning without text shards."""
    known = {}
    for shard in np.unique(documents[0]).tolist():
        wanted = set(documents[1, documents[0] == shard].tolist())
        try:
            for document, (_, fields) in enumerate(ledger.metadata(shard)):
                if document in wanted:
                    known[shard, document] = fields
                if document >= max(wanted):
                    break
        except UserError as error:
            log.warning("documents have no names: %s", error.violations[0])
            break
    return known


def _share(stretch: Stretch, step: int, numbers: np.ndarray, stage: LedgerConfig) -> np.ndarray:
    """The samples of one rank, or of one of its micro-batches."""
    config, rank, micro_batch = phases.at(stretch.config, step - 1), stage.rank or 0, stage.micro_batch
    starts = [event for event in events.read(stretch.run_dir) if event["event"] == "run_start" and event["step"] < step]
    if not starts or rank >= int(starts[-1]["ranks"]):
        rule = f"is no rank of the job that made step {step}" + (f", which had {starts[-1]['ranks']}" if starts else "")
        raise UserError.of("stage.rank", rank, rule, "choose a smaller one")
    layout = Layout.of(config, int(starts[-1]["ranks"]))
    if not str(starts[-1]["layout"]).startswith(layout.axes_text()):
        rule = f"is not known: step {step} was made with {starts[-1]['layout']}, and config.yaml has {layout.axes_text()}"
        raise UserError.of("stage.rank", rank, rule, "leave it out")
    count = len(numbers) // layout.batch_shards
    of_rank = numbers[layout.batch_shard(layout.coordinates(rank)) * count :][:count]
    if micro_batch is None:
        return of_rank
    size = config.training.micro_batch_size * config.training.sequence_length // config.training.sample_length
    if micro_batch * size >= count:
        raise UserError.of("stage.micro_batch", micro_batch, f"is not one of the {count // size} of a rank", "choose a smaller one")
    return of_rank[micro_batch * size :][:size]


def _steps_of_documents(stretches: list[Stretch], stage: LedgerConfig) -> Iterator[dict[str, Any]]:
    """Yield the chosen documents with the steps that have read them, and print how many they are."""
    asked = bool(stage.where or stage.ids or stage.contains)
    if not asked and stage.certificate is None:
        raise UserError.of(
            "stage.step", None, "is not set, and no documents are chosen", "set stage.step, stage.where, stage.ids or stage.contains"
        )
    selection = DocumentQuery(stage.where, None if stage.ids is None else _ids(Path(stage.ids)), stage.contains or "")
    removed = {removal.identity(line) for line in stretches[-1].removed}
    lines, ends = bytearray(), [0]  # JSON takes a fifth of the memory of dictionaries
    first: list[int] = []
    matched: dict[str, set[int]] = defaultdict(set)
    read: dict[str, set[int]] = defaultdict(set)
    by_run: dict[str, list[int]] = defaultdict(list)
    for stretch in stretches:
        ledger = stretch.ledger(stage.shards)
        for shard, of_shard in enumerate(ledger.shards if ledger else ()):
            assert ledger is not None
            content = of_shard.entry["xxh3"]
            chosen = (
                (document, values)
                for document, (text, values) in enumerate(ledger.metadata(shard))
                if (selection.matches(text, values) if asked else (content, document) in removed)
            )
            while fields := dict(itertools.islice(chosen, AT_ONCE)):
                for row in _rows(stretch, ledger, shard, fields):
                    lines += orjson.dumps(row)
                    ends.append(len(lines))
                    first.append(row["steps"][0] if row["steps"] else sys.maxsize)
                    matched[content].add(row["document"])
                    if row["steps"]:
                        read[content].add(row["document"])
                        span = by_run[row["run"]]
                        span[:] = min([*span[:1], row["steps"][0]]), max([*span[1:], row["steps"][-1]])
    if missing := ", ".join(sorted(selection.missing_fields)):
        raise UserError.of("stage.where", missing, "is a field of no training document", "the fields are in the answer of stage.step")
    if missing_ids := selection.missing_ids:
        log.warning("%d ids of %s are of no training document, such as %s", len(missing_ids), stage.ids, min(missing_ids))
    hint = "" if matched else "; capital and small letters differ, and * stands for any text"
    print(f"{sum(map(len, matched.values())):,} documents match, of which {sum(map(len, read.values())):,} were read{hint}")
    print("\n".join(_runs(stretches, by_run)) + "\n")
    yield from (orjson.loads(lines[ends[number] : ends[number + 1]]) for number in np.argsort(first, kind="stable").tolist())


def _ids(path: Path) -> frozenset[str]:
    """The lines of a file.

    Raises:
        UserError: it cannot be read, or has none.
    """
    try:
        ids = frozenset(line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError.of("stage.ids", path, f"cannot be read: {error}", "name a text file with one id a line") from error
    if not ids:
        raise UserError.of("stage.ids", path, "has no id", "write one a line")
    return ids


def _rows(stretch: Stretch, ledger: DocumentLedger, shard: int, fields: dict[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield documents of a shard with the steps of a run directory that have read them, and those that have left them out."""
    documents, content = np.array(list(fields), dtype=np.int64), ledger.shards[shard].entry["xxh3"]
    parts = ledger.samples_of(shard, documents, int(stretch.samples[-1]))
    when = stretch.steps(parts[1])
    parts, when = parts[:, when > 0], when[when > 0]
    out = stretch.leaves_out(content, documents, parts[0], when)
    tokens = np.bincount(parts[0, ~out], parts[2, ~out], len(documents)).tolist()
    steps, left_out = (_by_row(parts[0, chosen], when[chosen], len(documents)) for chosen in (~out, out))
    for document, read, at_steps, without in zip(documents.tolist(), tokens, steps, left_out, strict=True):
        place = ledger.place(shard, document)
        usage: dict[str, Any] = {"times": round(read / max(place["tokens"], 1), 3), "steps": at_steps}
        if (content, document) in stretch.removed_numbers:
            usage |= {"removed_from": stretch.removed_from((content, document)), "left_out": without}
        yield {**fields[document], "run": str(stretch.run_dir), **place, **usage}


def _by_row(rows: np.ndarray, steps: np.ndarray, count: int) -> Iterator[list[int]]:
    """Yield the steps of each of `count` rows in ascending order, each step once."""
    pairs = np.unique(rows << 32 | steps)
    bounds, values = np.searchsorted(pairs >> 32, np.arange(count + 1)).tolist(), (pairs & 0xFFFFFFFF).tolist()
    yield from (values[start:stop] for start, stop in itertools.pairwise(bounds))


def _runs(stretches: list[Stretch], read: Mapping[str, list[int]]) -> Iterator[str]:
    """Yield which steps of every run directory have read documents, and which checkpoints none. `read` has the first and the last step."""
    for stretch in stretches:
        span = read.get(str(stretch.run_dir))
        made = f"{stretch.run_dir}: steps {stretch.before + 1:,} to {stretch.last:,}"
        if not span:
            yield f"{made} have read none"
            continue
        yield f"{made}: first read at step {span[0]:,}, last at step {span[1]:,}"
        without = [native.step_of(path) for path in native.complete(stretch.run_dir) if native.step_of(path) < span[0]]
        yield f"  its checkpoints without them: {', '.join(map(str, without)) or 'none'}"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the first documents as a table."""
    columns = ("sample", "run", "corpus", "shard", "document", "tokens", "read", "times", "steps", "left_out", *FIELDS)
    names = [name for name in columns if any(name in row for row in rows)]
    if rows:
        yield from table_lines([names, *([_cell(name, row.get(name, "")) for name in names] for row in rows)])


def _cell(name: str, value: Any) -> str:
    """A value of the table; of many steps the first ones."""
    if name == "shard":
        return Path(value).name
    if name in FIELDS:
        return str(value)
    if isinstance(value, list):
        return " ".join(map(str, value[:4])) + (f" ... ({len(value)})" if len(value) > 4 else "")
    return f"{value:,}" if isinstance(value, int) else str(value)
