"""`hydra/launcher=slurm`: a sweep's points as Slurm jobs."""

from __future__ import annotations


def register() -> None:
    """Make the launcher known to Hydra."""
