"""Rules of the keys outside of groups."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import RunConfig


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules of run_dir."""
    if not config.run_dir.strip():
        yield Violation("run_dir", repr(config.run_dir), "must name a folder", "set run_dir, or remove an unset variable from it")
