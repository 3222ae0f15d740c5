"""Validation rules of the settings of a stage."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate, Plan
from pipeline.errors import Violation

#: What is planned instead of the configured job.
PLANS = ("search", "scaling", "table", "run")


def plan(stage: Plan) -> Iterator[Violation]:
    """One kind of plan at a time, and pictures of those that have one."""
    kinds = [kind for kind in PLANS if getattr(stage, kind)]
    for other in kinds[1:]:
        rule = f"plans something else than stage.{kinds[0]}={getattr(stage, kinds[0])}"
        yield Violation(f"stage.{other}", getattr(stage, other), rule, "set one of them")
    if stage.plot and kinds and kinds[0] in ("table", "run"):
        yield Violation("stage.plot", stage.plot, f"has no picture of stage.{kinds[0]}", "remove it")


def stride(config: RunConfig, stage: Evaluate) -> Iterator[Violation]:
    """Overlapping windows are those of the validation split of a causal model."""
    if stage.stride is None:
        return
    if stage.tasks:
        yield Violation("stage.stride", stage.stride, "is read without stage.tasks only", "remove it")
    elif config.model.objective != "causal":
        rule = f"requires a causal language model; model.family={config.model.family} has the objective {config.model.objective}"
        yield Violation("stage.stride", stage.stride, rule, "remove it")
    elif stage.stride > config.training.sequence_length:
        rule = f"must not exceed training.sequence_length={config.training.sequence_length}"
        yield Violation("stage.stride", stage.stride, rule, "reduce it, for example to half of training.sequence_length")
