"""Python imports this module when a process starts with this folder on PYTHONPATH: it traces the ranks and writers of a job under test."""

import os
import sys


def _role() -> str:
    """Of this process; empty if it is not traced."""
    if "CHAOS_SOCKET" not in os.environ:
        return ""
    if "pipeline.checkpoint.writer" in sys.orig_argv:
        return "writer"
    is_rank = sys.orig_argv[1:3] == ["-m", "pipeline"] and "SLURM_STEP_ID" in os.environ  # without Slurm, tracing.run_rank traces ranks
    return f"rank {os.environ['SLURM_PROCID']}" if is_rank else ""


if role := _role():
    from tools.faults import tracing

    tracing.install(role)
