"""Rules across keys. Every violation is collected, so that a user mends them all at once."""

from __future__ import annotations

from pipeline.config.schema import RunConfig
from pipeline.errors import UserError, Violation


def check(config: RunConfig, world_size: int) -> None:
    """Refuse an impossible combination before any work starts.

    Args:
        world_size: ranks of this job.

    Raises:
        UserError: with every violation found.
    """
    violations: list[Violation] = []
    if violations:
        raise UserError(violations)
