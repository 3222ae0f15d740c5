"""What a checkpoint has read of documents that were removed from a run (data.remove), as a file that another person can check.

It states a number of times for every document, and says of the rest what it is: the weights have learned from what was read before the
removal, and nothing here changes that.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from pipeline.checkpoint import checked_json, native
from pipeline.common import artifact, events, git_commit, metrics_file
from pipeline.common.errors import UserError
from pipeline.data.load import removal
from pipeline.data.load.ledger import DocumentLedger
from pipeline.training.lineage import Stretch

#: Files of a run directory from which the statement follows.
EVIDENCE = ("config.yaml", removal.FILE, metrics_file.FILE, events.FILE, "skipped_samples.json")


def checkpoint_of(run_dir: Path, step: int | None) -> Path:
    """Return the checkpoint of a step, the newest one by default.

    Raises:
        UserError: there is none.
    """
    complete = native.complete(run_dir)
    matches = [path for path in complete if step in (None, native.step_of(path))]
    if not matches:
        steps = ", ".join(str(native.step_of(path)) for path in complete) or "none"
        raise UserError.of("stage.step", step, f"is no checkpoint of {run_dir}, which has: {steps}", "choose one of them")
    return matches[-1]


def write(
    path: Path,
    checkpoint: Path,
    question: dict[str, Any],
    stretches: list[Stretch],
    rows: list[dict[str, Any]],
    ledger: DocumentLedger | None,
    gaps: list[str],
) -> str:
    """Write the certificate, and return it in words.

    Args:
        checkpoint: it is about this one, and the steps that led to it.
        question: which documents were asked for.
        stretches: the steps that led to the checkpoint.
        rows: what stage=ledger answers of the documents, for each of the stretches.
        ledger: of the last one.
        gaps: what the weights have learned from besides, as of lineage.read.

    Raises:
        UserError: no document was found, one was read and is not left out, or is still readable by the loader of the run, or a shard of
            theirs has another checksum than in its manifest.
    """
    last = stretches[-1]
    left_out = {removal.identity(line) for line in last.left_out(last.last)}
    documents: dict[removal.Identity, dict[str, Any]] = {}
    for row in rows:
        if (since := row.get("removed_from")) is not None and row["steps"] and row["steps"][-1] >= since:
            rule = f"document {row['document']} of {row['shard']} was removed from step {since} on, and read at step {row['steps'][-1]}"
            raise UserError.of("stage.certificate", path, rule, f"{removal.FILE} of {row['run']} was changed by hand: restore it")
        entry = documents.setdefault(removal.identity(row), {**row, "times": 0.0, "steps": {}, "left_out": {}})
        entry["times"] = round(entry["times"] + row["times"], 3)
        entry["steps"] |= {row["run"]: row["steps"]} if row["steps"] else {}
        entry["left_out"] |= {row["run"]: row["left_out"]} if row.get("left_out") else {}
    if not documents:
        raise UserError.of("stage.certificate", path, "has no documents to speak of: none was removed, none matches", "choose documents")
    if open_ones := [row for key, row in documents.items() if key not in left_out and row["steps"]]:
        rule = f"{len(open_ones)} of {len(documents)} documents were read, and step {last.last} of {last.run_dir} does not leave them out, "
        rule += f"such as {open_ones[0].get('id', open_ones[0]['document'])}"
        fix = "remove them (data.remove), train on, and name a later checkpoint"
        raise UserError.of("stage.certificate", path, rule, fix)
    shards = {shard.entry["xxh3"]: (number, shard) for number, shard in enumerate(ledger.shards if ledger else ())}
    for (content, document), row in documents.items():
        row["removed"] = (content, document) in left_out
        if ledger is not None and row["removed"] and content in shards and (tokens := ledger.readable(shards[content][0], document)):
            raise UserError.of(
                "stage.certificate", path, f"{tokens} tokens of document {document} would be read", "report this as a defect"
            )
        del row["run"]
    for content in sorted({content for content, _ in documents} & set(shards)):
        shards[content][1].verify()
    read = [row for row in documents.values() if row["steps"]]
    text = _text(checkpoint, stretches, list(documents.values()), read, gaps)
    statement = {
        "statement": text,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "made_by": git_commit.version(),
        "checkpoint": {"path": str(checkpoint), "step": native.step_of(checkpoint), "index": artifact.entry(checkpoint / native.INDEX)},
        "question": {name: value for name, value in question.items() if value},
        "totals": {
            "documents": len(documents),
            "read_before_removal": len(read),
            "times_before_removal": round(sum(row["times"] for row in read), 3),
            "tokens_read_since_removal": 0,
        },
        "not_known": gaps,
        "documents": list(documents.values()),
        "token_shards": {str(shard.path): content for content, (_, shard) in shards.items()},
        "runs": [
            {
                "run_dir": str(stretch.run_dir),
                "steps": [stretch.before + 1, stretch.last],
                "code": sorted({str(event["version"]) for event in events.read(stretch.run_dir) if "version" in event}),
                "files": {name: artifact.entry(stretch.run_dir / name) for name in EVIDENCE if (stretch.run_dir / name).is_file()},
            }
            for stretch in stretches
        ],
    }
    checked_json.write(path, statement)
    return text


def _text(checkpoint: Path, stretches: list[Stretch], documents: list[dict[str, Any]], read: list[dict[str, Any]], gaps: list[str]) -> str:
    """The statement in words."""
    removed, step = sum(row["removed"] for row in documents), native.step_of(checkpoint)
    lines = [
        f"{checkpoint}: {len(documents):,} documents were asked for, {removed:,} of them are removed; "
        f"runs that leave them out have read none of their tokens since, up to step {step:,}.",
        f"Before the removal {len(read):,} of them were read, {sum(row['times'] for row in read):,.1f} times in total.",
    ]
    for stretch in stretches:
        steps = [step for row in read for step in row["steps"].get(str(stretch.run_dir), ())]
        if steps:
            without = [str(native.step_of(path)) for path in native.complete(stretch.run_dir) if native.step_of(path) < min(steps)]
            lines.append(
                f"{stretch.run_dir} read them at steps {min(steps):,} to {max(steps):,}: later weights have learned from them, which a "
                f"removal does not undo. Checkpoints from before: {', '.join(without) or 'none'}."
            )
            if not any(removal.identity(row) in stretch.removed_numbers for row in read):
                lines.append(f"{stretch.run_dir} itself has not left them out.")
    if gaps:
        lines.append(f"The weights have also learned from what is not known: {'; '.join(gaps)}.")
    elif not read:
        lines.append("None was ever read: the weights have not learned from them.")
    return "\n".join(lines)
