"""Rules of the group optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import RunConfig


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if warm-up and decay are longer than the run, or no decay has that length."""
    optimizer, steps = config.optimizer, config.training.steps
    if optimizer.decay_steps and optimizer.schedule != "wsd":
        rule = f"has no effect with optimizer.schedule={optimizer.schedule}, which decays from the end of the warm-up to the end of the run"
        yield Violation("optimizer.decay_steps", optimizer.decay_steps, rule, "remove it, or set optimizer.schedule=wsd")
    if steps and optimizer.warmup_steps + optimizer.decay_steps > steps:  # 0: known once the data is open
        rule = f"plus optimizer.decay_steps={optimizer.decay_steps} must not exceed training.steps={steps}"
        yield Violation("optimizer.warmup_steps", optimizer.warmup_steps, rule, "reduce them, or increase training.steps")
