"""Rules of the group checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import CheckpointConfig


def violations(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """Yield a violation if a run would start in two ways."""
    start, resume = checkpoint.initialize_from, checkpoint.resume
    if start is not None and resume not in ("auto", "none"):
        rule = f"starts the run, and so does checkpoint.resume={resume}"
        yield Violation("checkpoint.initialize_from", start, rule, "set one of them")
