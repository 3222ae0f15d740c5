"""Rules of the group cluster; those of the options of its jobs are in launch/job.py."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import UserError, Violation
from pipeline.config import hardware
from pipeline.config.schema import ClusterConfig


def violations(cluster: ClusterConfig) -> Iterator[Violation]:
    """Yield the violations of cluster.hardware: it names a file, which describes a GPU."""
    if cluster.hardware is not None:
        try:
            hardware.load(cluster.hardware)
        except UserError as error:
            yield from error.violations
