"""Rules of the group dry_run."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES


def violations(config: RunConfig, world_size: int) -> Iterator[Violation]:
    """Yield the violated rules; world_size is that of the simulated job."""
    settings = config.dry_run
    if not settings.enabled:
        for key, value, default in (("rank", settings.rank, 0), ("world_size", settings.world_size, None)):
            if value != default:
                fix = f"add dry_run=true, or remove it to run stage={config.stage.name}"
                yield Violation(f"dry_run.{key}", value, "has no effect without dry_run=true", fix)
    elif config.stage.name in TRAINING_STAGES and settings.rank >= world_size:
        rule = f"must be less than the world size {world_size}"
        yield Violation("dry_run.rank", settings.rank, rule, f"choose a rank from 0 to {world_size - 1}")
