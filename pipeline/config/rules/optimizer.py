"""Rules of the group optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config import warmup
from pipeline.config.schema import OptimizerConfig, RunConfig


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if warm-up and decays do not fit into the run, or the schedule does not read a setting of decays."""
    optimizer, steps = config.optimizer, config.training.steps
    if optimizer.schedule != "wsd":
        for name in ("decay_steps", "decay_shape", "decay_ends"):
            if (value := getattr(optimizer, name)) != getattr(OptimizerConfig(), name):
                rule = f"has no effect with optimizer.schedule={optimizer.schedule}: it is that of the decays of wsd"
                yield Violation(f"optimizer.{name}", value, rule, "remove it, or set optimizer.schedule=wsd")
    if steps and optimizer.warmup_steps + optimizer.decay_steps > steps:  # 0: known once the data is open
        rule = f"plus optimizer.decay_steps={optimizer.decay_steps} must not exceed training.steps={steps}"
        yield Violation("optimizer.warmup_steps", optimizer.warmup_steps, rule, "reduce them, or increase training.steps")
    if optimizer.schedule == "wsd" and optimizer.decay_ends:
        yield from _decay_ends(config)


def _decay_ends(config: RunConfig) -> Iterator[Violation]:
    """Every decay begins after the warm-up and the decay before it have ended."""
    optimizer, training = config.optimizer, config.training
    before, what = warmup.lr_steps(optimizer, training), "the warm-up"
    keys = [*(f"optimizer.decay_ends.{number}" for number in range(len(optimizer.decay_ends))), "training.steps"]
    for key, (begin, end) in zip(keys, warmup.decays(optimizer, training), strict=True):
        if begin < before and end:  # 0: known once the data is open
            rule = f"is the end of a decay of {end - begin} steps, which begins before the end of {what} at step {before}"
            least = before + (optimizer.decay_steps or max(1, before // 9))
            yield Violation(key, end, rule, f"set it to at least {least}, or reduce optimizer.decay_steps")
        before, what = end, "the decay before it"
