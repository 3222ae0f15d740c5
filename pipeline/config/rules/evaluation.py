"""Rules of the group evaluation. Those of the settings of its jobs are checked when the run starts (launch/evaluation_jobs.py)."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules: a job has something to evaluate."""
    wanted = config.evaluation
    if not wanted.every or config.stage.name not in TRAINING_STAGES:
        return
    if not (wanted.validation or wanted.tasks):
        yield Violation("evaluation.validation", False, "leaves nothing to evaluate", "set it to true, or set evaluation.tasks")
    if wanted.tasks and wanted.task_folder is None:
        yield Violation("evaluation.task_folder", None, "is required by evaluation.tasks", "set it to the folder with their .yaml files")
    if wanted.validation and config.stage.name == "finetune" and not config.data.instructions.validation:
        fix = "name files in data.instructions.validation, or set it to false"
        yield Violation("evaluation.validation", True, "requires data.instructions.validation in stage=finetune", fix)
