"""Rules of the group checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import CheckpointConfig


def violations(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """Yield a violation if a run would start in two ways, or in one that has another name."""
    start, fork, resume = checkpoint.initialize_from, checkpoint.fork, checkpoint.resume
    if start is not None and fork is not None:
        rule = f"starts the run, and so does checkpoint.fork={fork}"
        fix = "keep fork for weights, optimizer state, step and samples, or initialize_from for weights alone"
        yield Violation("checkpoint.initialize_from", start, rule, fix)
    if resume not in ("auto", "none"):
        rule = "must be auto or none: it says whether run_dir is continued"
        yield Violation("checkpoint.resume", resume, rule, f"set checkpoint.fork={resume} to start a new run from that checkpoint")
