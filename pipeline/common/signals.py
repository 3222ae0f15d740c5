"""Signals that announce the end of a job."""

from __future__ import annotations

import signal

#: The signals that this process has received: SIGUSR1, which slurm/pretrain.sbatch requests before the time limit, and SIGTERM, which
#: scancel and preemption send.
received: set[int] = set()


def record(number: signal.Signals) -> None:
    """Record a signal instead of ending the process. Training then writes a checkpoint and stops."""
    signal.signal(number, lambda number, _: received.add(number))
