"""Python imports this module when a process starts with this folder on PYTHONPATH: it traces the writer process of a job under test."""

import os
import sys

if "pipeline.checkpoint.writer" in sys.orig_argv and "CHAOS_SOCKET" in os.environ:
    from tools.chaos import tracing

    tracing.install("writer")
