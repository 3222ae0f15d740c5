"""Which checkpoints a job evaluates."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pipeline.checkpoint import catalog, native, reader
from pipeline.checkpoint.peft_format import WEIGHTS
from pipeline.common.atomic_files import digest
from pipeline.common.errors import UserError
from pipeline.common.ranks import array_task
from pipeline.config.stages import Evaluate
from pipeline.evaluation import record

log = logging.getLogger("pipeline")

#: The value of stage.checkpoint that selects every checkpoint of run_dir.
ALL = "all"


def settings_of(path: Path, stage: Evaluate, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what the scores of a checkpoint depend on: its content, the adapter, and the settings of the evaluation.

    Raises:
        DamagedCheckpointError: the checkpoint was removed since it was chosen.
    """
    native.with_index(path)
    adapter = None if stage.adapter is None else digest(Path(stage.adapter) / WEIGHTS)
    return {
        "stage.checkpoint": digest(path / native.INDEX),
        "stage.adapter": adapter,
        **reader.settings_of_weights(stage.weights),
        **settings,
    }


def current(run_dir: Path, stage: Evaluate, path: Path) -> list[Path]:
    """Return a chosen checkpoint, or the newest one by now if stage.checkpoint is "latest"."""
    return [native.find(run_dir, stage.checkpoint) if stage.checkpoint == "latest" else path]


def checkpoints(run_dir: Path, stage: Evaluate, kind: str, settings: dict[str, Any], steps: int = 0) -> list[Path]:
    """Return the checkpoints to evaluate: the one that is named, or with stage.checkpoint=all those that were not evaluated yet.

    The tasks of a Slurm job array share the checkpoints.

    Args:
        run_dir: the run directory.
        stage: the settings of the stage.
        kind: as in record.path_of.
        settings: what the scores depend on besides the checkpoint.
        steps: training.steps; with stage.every, the last checkpoint is evaluated, too.

    Raises:
        UserError: there is none.
    """
    if stage.checkpoint != ALL:
        return [native.find(run_dir, stage.checkpoint)]
    complete = [native.folder_of(run_dir, step) for step in catalog.listed(run_dir)]  # those that a user copied there, too
    if not complete:
        raise UserError.of("run_dir", run_dir, "contains no checkpoint", f"run stage=pretrain with run_dir={run_dir} first")
    complete = [path for path in complete if record.is_due(native.step_of(path), stage.every, steps)]
    task = array_task()
    mine = complete if task is None else complete[task.index :: task.size]
    missing = [path for path in mine if not record.is_recorded(run_dir, native.step_of(path), kind, settings_of(path, stage, settings))]
    if len(missing) < len(mine):
        log.info("evaluate: %d of %d checkpoints are evaluated already", len(mine) - len(missing), len(mine))
    return missing
