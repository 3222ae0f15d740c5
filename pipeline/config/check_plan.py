"""Validation rules of stage=plan."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.stages import Plan
from pipeline.errors import Violation

#: What is planned instead of the configured job.
KINDS = ("search", "scaling", "table", "run")


def violations(stage: Plan) -> Iterator[Violation]:
    """One kind of plan at a time, and pictures of those that have one."""
    kinds = [kind for kind in KINDS if getattr(stage, kind)]
    for other in kinds[1:]:
        rule = f"plans something else than stage.{kinds[0]}={getattr(stage, kinds[0])}"
        yield Violation(f"stage.{other}", getattr(stage, other), rule, "set one of them")
    if stage.plot and kinds and kinds[0] in ("table", "run"):
        yield Violation("stage.plot", stage.plot, f"has no picture of stage.{kinds[0]}", "remove it")
