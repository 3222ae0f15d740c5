"""Rules of the group evaluation. Those of the settings of its jobs are checked when the run starts (launch/evaluation_jobs.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import EvaluationConfig, RunConfig
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
    if reads_average(wanted) and config.training.ema is None:
        rule = "evaluate averaged weights, and training.ema is not set"
        yield Violation("evaluation.overrides", wanted.overrides, rule, "set training.ema=0.999, or remove stage.weights=ema")
    lines = config.data.instructions.validation or config.data.instructions.tokens
    if wanted.validation and config.stage.name == "finetune" and not lines:
        fix = "name files in data.instructions.validation, or set it to false"
        yield Violation("evaluation.validation", True, "requires data.instructions.validation in stage=finetune", fix)


def reads_average(wanted: EvaluationConfig) -> bool:
    """Whether the jobs evaluate averaged weights."""
    chosen = [match[1] for override in wanted.overrides if (match := re.fullmatch(r"stage\.weights=\W*(\w+)\W*", override))]
    return chosen[-1:] == ["ema"]
