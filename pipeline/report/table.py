"""The table of runs: as text, CSV and JSON, with the numbers of run.Run."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.common.texts import first_names, table_lines
from pipeline.report import comparison, run_files
from pipeline.report import run as runs
from pipeline.report.answers import short
from pipeline.report.run import Run, State, duration

log = logging.getLogger("pipeline")

#: Columns of CSV and JSON: attributes of Run.
COLUMNS = (
    *("run_dir", "state", "reason", "stage", "step", "steps", "loss", "validation_loss", "validation_loss_stderr", "validation_step"),
    *(
        "bits_per_byte",
        "tokens",
        "tokens_per_second",
        "seconds_per_step",
        "seconds_left",
        "restarts",
        "node_hours",
        "nodes",
        "job",
        "skipped",
    ),
    *("save_failures", "error", "last_sign"),
)
#: Folders below a given one in which runs are searched, such as FOLDER/SWEEP/POINT.
DEPTH = 3
#: Folders that no run is in, and that may have many files.
_NEVER = ("checkpoints", "snapshots", "shards", "tokens", "tokenizer", "hf", "wandb", "evaluations")
#: Runs that are named with a problem.
_NAMED = 4
#: Threads that wait for the file system.
_THREADS = 16


def runs_below(folder: Path, depth: int = DEPTH, above: tuple[str, ...] = ()) -> list[Path]:
    """Return the run directories in a folder, in the order of their names; the folder itself if it is one. No run is looked into.

    A folder that cannot be read is named in the log.

    Args:
        folder: which exists.
        depth: levels of subfolders.
        above: real paths of the folders that led here: a symbolic link to one of them is not followed.
    """
    if (real := os.path.realpath(folder)) in above:
        return []
    try:
        if run_files.is_run(folder):
            return [folder]
        if depth == 0:
            return []
        with os.scandir(folder) as entries:
            inside = [entry.name for entry in entries if entry.name not in _NEVER and entry.name[0] != "." and entry.is_dir()]
    except OSError as error:  # a folder of someone else, or one that was removed in the meantime
        log.warning("%s: cannot be read (%s): runs in it are left out", folder, error.strerror)
        return []
    names = sorted(inside, key=lambda name: (len(name), name))
    return [run for name in names for run in runs_below(folder / name, depth - 1, (*above, real))]


def read_all(run_dirs: Sequence[Path], now: float | None = None) -> list[Run]:
    """Return the runs, in their order; files are read by several threads."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(lambda run_dir: runs.read(run_dir, now), run_dirs))


def text(rows: Sequence[Run], width: int) -> str:
    """Return the table for a terminal, and below it what is damaged.

    Args:
        rows: the runs, at least one.
        width: columns of the terminal; a row is cut there.
    """
    folder = os.path.commonpath([Path(run.run_dir).absolute().parent for run in rows])
    head = ("run", "state", "step", "loss", "validation", "tokens/s", "left", "restarts", "node-h", "job", "why")
    per_byte = comparison.per_byte(rows)
    cells = [head, *((os.path.relpath(run.run_dir, folder), *cells_of(run, per_byte=per_byte)[1:]) for run in rows)]
    lines = [line if len(line) <= width else f"{line[: width - 1]}…" for line in table_lines(cells, right={2, 3, 5, 6, 7, 8})]
    states = Counter(run.state for run in rows)
    counts = ", ".join(f"{states[state]} {state}" for state in State if states[state])
    notes = ["", "validation is in bits per byte, since the runs have different tokenizers"] if per_byte else []
    damaged = problems([(os.path.relpath(run.run_dir, folder), run) for run in rows])
    return "\n".join([f"{folder}: {counts}", "", *lines, *notes, *(["", *damaged] if damaged else [])])


def problems(rows: Sequence[tuple[str, Run]]) -> list[str]:
    """Return a line for each problem of runs."""
    names_by_problem: dict[str, list[str]] = {}
    for name, run in rows:
        for problem in run.problems:
            names_by_problem.setdefault(problem, []).append(name)
    return [f"{first_names(names, _NAMED)}: {problem}" for problem, names in names_by_problem.items()]


def cells_of(run: Run, *, per_byte: bool = False) -> tuple[str, ...]:
    """Return the cells of a row of text(); "-" for what is not known. The validation is a loss, or bits per byte."""
    score = comparison.score(run, per_byte=per_byte)
    error = "" if per_byte or not run.validation_loss_stderr else f" +- {run.validation_loss_stderr:.3f}"
    return (
        run.run_dir,
        str(run.state),
        f"{run.step:,}/{run.steps:,}" if run.steps is not None else f"{run.step:,}",
        "-" if run.loss is None else f"{run.loss:.4f}",
        "-" if score is None else f"{score:.4f}{error}",
        "-" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        "-" if run.seconds_left is None else duration(run.seconds_left),
        str(run.restarts) if run.starts else "-",
        "-" if run.node_hours is None else f"{run.node_hours:.2f}",
        run.job or "-",
        short("; ".join(filter(None, (run.trouble, run.reason))), 80),
    )


def as_csv(rows: Iterable[Run]) -> str:
    """Return the table as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(values_of(run) for run in rows)
    return out.getvalue()


def as_json(rows: Iterable[Run]) -> str:
    """Return the table as JSON: a list of objects, also with the problems of each run."""
    return json.dumps([values_of(run) | {"problems": list(run.problems)} for run in rows], indent=1, allow_nan=False) + "\n"


def values_of(run: Run) -> dict[str, Any]:
    """The columns of a run."""
    return {name: plain(getattr(run, name)) for name in COLUMNS}


def plain(value: Any) -> Any:
    """Return a value that CSV and JSON have: None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
