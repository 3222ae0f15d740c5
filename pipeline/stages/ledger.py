"""ledger: which documents a step has read, or which steps have read a document, from a run directory and its shards. Requires no GPU."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

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
from pipeline.data.load.ledger import Ledger, Selection
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import TokenShardObjective
from pipeline.training import lineage
from pipeline.training.lineage import Stretch

log = logging.getLogger("pipeline")

#: Documents that are printed; stage.out has all.
SHOWN = 25
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
    stretches = lineage.read(Path(config.run_dir))
    rows = _documents_of_step(stretches, stage) if stage.step else _steps_of_documents(stretches, stage)
    shown: list[dict[str, Any]] = []
    with nullcontext() if stage.out is None else atomic_file(Path(stage.out), "w") as handle:
        for row in rows:
            if len(shown) < SHOWN:
                shown.append(row)
            elif handle is None:
                break
            if handle is not None:
                handle.write(json.dumps(row) + "\n")
    print("\n".join(_table(shown)))
    if stage.out:
        print(f"\n{stage.out}")


def _opened(stretch: Stretch, stage: LedgerConfig) -> Ledger | None:
    """The documents of the samples of a run; None with a warning if these are no documents."""
    config = stretch.config
    kind = registry.objective_of(config)
    if not issubclass(kind, TokenShardObjective):
        log.warning("%s has read %s, which has no documents: its steps are left out", stretch.run_dir, kind.data_key)
        return None
    data = dataclasses.replace(config.data, verify="off", stage_in=None)
    folders = [Path(folder) for folder in stage.shards or [config.data.shards]]
    return Ledger(
        kind.open_training(dataclasses.replace(config, data=data), (1, 2)).samples, [f for f in folders if stage.shards or f.is_dir()]
    )


def _documents_of_step(stretches: list[Stretch], stage: LedgerConfig) -> Iterator[dict[str, Any]]:
    """Yield the documents of a step in their order, and print how many they are.

    Raises:
        UserError: the run has not made this step, or the rank is not one of the job that made it.
    """
    step = stage.step or 0
    stretch = next((found for found in reversed(stretches) if found.before < step <= found.last), None)
    if stretch is None:
        rule = f"was not made: the steps of {stretches[-1].run_dir} are {stretches[0].before + 1} to {stretches[-1].last}"
        raise UserError.of("stage.step", step, rule, "choose one of them")
    numbers, what = stretch.numbers(step), f"step {step} of {stretch.run_dir}"
    if stage.rank is not None:
        numbers = _share(stretch, step, numbers, stage)
        what += f", rank {stage.rank}" + ("" if stage.micro_batch is None else f", micro-batch {stage.micro_batch}")
    if (ledger := _opened(stretch, stage)) is None:
        return
    parts = ledger.documents(numbers)
    keys, first = np.unique(parts[1] << 32 | parts[2], return_index=True)
    print(f"{what}: {len(numbers):,} samples, {int(parts[3].sum()):,} tokens, {len(keys):,} documents\n")
    fields = _fields(ledger, parts[1:3, np.sort(first)[: None if stage.out else SHOWN]])
    for row, shard, document, tokens in parts.T.tolist():
        entry = ledger.shards[shard].entry
        place = {"shard": str(ledger.shards[shard].path), "document": document}
        yield {"sample": int(numbers[row]), "corpus": entry["corpus"], **place, "tokens": tokens, **fields.get((shard, document), {})}


def _fields(ledger: Ledger, documents: np.ndarray) -> dict[tuple[int, int], dict[str, Any]]:
    """The metadata of documents by (shard, document), of which `documents` (2, n) has pairs; empty with a warning without text shards."""
    found = {}
    for shard in np.unique(documents[0]).tolist():
        wanted = set(documents[1, documents[0] == shard].tolist())
        try:
            for document, (_, fields) in enumerate(ledger.metadata(shard)):
                if document in wanted:
                    found[shard, document] = fields
                if document >= max(wanted):
                    break
        except UserError as error:
            log.warning("documents have no names: %s", error.violations[0])
            break
    return found


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
    own = numbers[layout.batch_shard(layout.coordinates(rank)) * count :][:count]
    if micro_batch is None:
        return own
    each = config.training.micro_batch_size * config.training.sequence_length // config.training.sample_length
    if micro_batch * each >= count:
        raise UserError.of("stage.micro_batch", micro_batch, f"is not one of the {count // each} of a rank", "choose a smaller one")
    return own[micro_batch * each :][:each]


def _steps_of_documents(stretches: list[Stretch], stage: LedgerConfig) -> Iterator[dict[str, Any]]:
    """Yield the chosen documents with the steps that have read them, and print how many they are."""
    if not (stage.where or stage.ids or stage.contains):
        raise UserError.of(
            "stage.step", None, "is required, or a choice of documents", "set stage.step, stage.where, stage.ids or stage.contains"
        )
    ids = None if stage.ids is None else frozenset(Path(stage.ids).read_text(encoding="utf-8").split("\n"))
    selection = Selection(stage.where, ids, stage.contains or "")
    matched = read = 0
    steps: list[tuple[str, int]] = []
    rows = []
    for stretch in stretches:
        ledger = _opened(stretch, stage)
        for shard, of_shard in enumerate(ledger.shards if ledger else ()):
            assert ledger is not None
            fields = {n: values for n, (text, values) in enumerate(ledger.metadata(shard)) if selection.matches(text, values)}
            if not fields:
                continue
            documents = np.array(list(fields), dtype=np.int64)
            parts = ledger.samples_of(shard, documents, int(stretch.samples[-1]))
            when = stretch.steps(parts[1])
            parts, when = parts[:, when > 0], when[when > 0]
            order = np.lexsort((when, parts[0]))
            bounds = np.searchsorted(parts[0][order], np.arange(len(documents) + 1))
            tokens = ledger.tokens(shard)[documents]
            for n, document in enumerate(documents.tolist()):
                own = order[bounds[n] : bounds[n + 1]]
                made = list(dict.fromkeys(when[own].tolist()))
                matched, read = matched + 1, read + bool(made)
                steps += [(str(stretch.run_dir), step) for step in (made[:1] + made[-1:])]
                times = int(parts[2, own].sum()) / max(int(tokens[n]), 1)
                place = {"corpus": of_shard.entry["corpus"], "shard": str(of_shard.path), "document": document, "tokens": int(tokens[n])}
                rows.append({"run": str(stretch.run_dir), **place, "times": round(times, 3), "steps": made, **fields[document]})
    print("\n".join(_summary(stretches, matched, read, steps)) + "\n")
    yield from sorted(rows, key=lambda row: (not row["steps"], row["steps"][:1]))


def _summary(stretches: list[Stretch], matched: int, read: int, steps: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Yield how many documents were found and read, and which checkpoints have read none of them."""
    yield f"{matched:,} documents match, of which {read:,} were read"
    for stretch in stretches:
        own = [step for run_dir, step in steps if run_dir == str(stretch.run_dir)]
        made = f"{stretch.run_dir}: steps {stretch.before + 1:,} to {stretch.last:,}"
        if not own:
            yield f"{made} have read none"
            continue
        yield f"{made}: first read at step {min(own):,}, last at step {max(own):,}"
        without = [native.step_of(path) for path in native.complete(stretch.run_dir) if native.step_of(path) < min(own)]
        yield f"  its checkpoints without them: {', '.join(map(str, without)) or 'none'}"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the first documents as a table."""
    names = [
        name for name in ("sample", "run", "corpus", "document", "tokens", "times", "steps", *FIELDS) if any(name in row for row in rows)
    ]
    if rows:
        yield from table_lines([names, *([_cell(row.get(name, "")) for name in names] for row in rows)])


def _cell(value: Any) -> str:
    """A value of the table; of many steps the first ones."""
    if isinstance(value, list):
        return " ".join(map(str, value[:4])) + (f" ... ({len(value)})" if len(value) > 4 else "")
    return f"{value:,}" if isinstance(value, int) else str(value)
