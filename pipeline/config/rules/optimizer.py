"""Rules of the group optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import RunConfig


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if warm-up and decay are longer than the run."""
    optimizer, steps = config.optimizer, config.training.steps
    if steps and optimizer.warmup_steps + optimizer.decay_steps > steps:  # 0: known once the data is open
        rule = f"plus optimizer.decay_steps={optimizer.decay_steps} must not exceed training.steps={steps}"
        yield Violation("optimizer.warmup_steps", optimizer.warmup_steps, rule, "reduce them, or increase training.steps")
