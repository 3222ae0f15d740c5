"""report: run directories of training runs -> one HTML page, which loads nothing, and the same answers in the terminal."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.common.atomic_files import atomic_file, make_folder
from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Report
from pipeline.launch import sweep_manifest
from pipeline.report import answers, comparison, history, page, table


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write the page of run_dir, or of the runs in it and stage.compare, and print the answers.

    Raises:
        UserError: a folder has no training run, or the page cannot be written.
    """
    stage = config.stage
    assert isinstance(stage, Report)
    if ranks.rank > 0:
        return  # additional ranks do nothing
    paths = [path for folder, key in _folders(config.run_dir, stage) for path in _runs(folder, key)]
    out = Path(stage.out or Path(config.run_dir, "report.html"))
    make_folder(out.parent, "stage.out" if stage.out else "run_dir")
    histories = [history.read(path) for path in dict.fromkeys(paths)]
    width = min(shutil.get_terminal_size((120, 24)).columns, 140)
    for single in histories if len(histories) == 1 else ():
        print("\n".join(answers.lines(single, width)))
    if len(histories) > 1:
        places = page.compared(histories)
        print(table.text([place.run for place in places], width))
        print(f"\n{comparison.verdict(places)}")
    waiting = [line for folder, _ in _folders(config.run_dir, stage) for line in sweep_manifest.not_begun(folder)]
    for line in waiting:
        print(line)
    with atomic_file(out, "w") as handle:
        handle.write(page.of_run(histories[0], waiting) if len(histories) == 1 else page.of_runs(histories, waiting))
    print(f"\n{out}")


def _folders(run_dir: str, stage: Report) -> list[tuple[Path, str]]:
    """The folders that a command names, with their keys."""
    return [(Path(run_dir), "run_dir"), *((Path(folder), "stage.compare") for folder in stage.compare)]


def _runs(folder: Path, key: str) -> list[Path]:
    """The runs in a folder.

    Raises:
        UserError: there is none.
    """
    if not folder.is_dir():
        near = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())[:8] if folder.parent.is_dir() else []
        fix = f"set {key} to a run directory; {folder.parent} has {', '.join(near)}" if near else f"set {key} to a run directory"
        raise UserError.of(key, folder, "does not exist", fix)
    if not (runs := table.runs_below(folder)):
        rule = "contains no training run: neither events.jsonl nor metrics.jsonl"
        raise UserError.of(key, folder, rule, f"set {key} to the run_dir of stage=pretrain or stage=finetune, or to a folder of several")
    return runs
