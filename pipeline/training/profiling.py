"""training.profile: torch.profiler records single steps of chosen ranks; RUN/profile then has a trace and a report of each."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.common.atomic_files import atomic_file
from pipeline.config.schema import RunConfig
from pipeline.training import trace_report
from pipeline.training.callback import Callback

log = logging.getLogger("pipeline")

#: Folder of a run directory.
FOLDER = "profile"
#: Operations in a report.
_OPERATIONS = 10


class Profiler(Callback):
    """Profiles steps of a rank.

    Args:
        config: of the run.
        rank: of this process.
    """

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._folder, self._rank = Path(config.run_dir) / FOLDER, rank
        self._steps = frozenset(config.training.profile) if rank in config.training.profile_ranks else frozenset()

    @contextmanager
    def during_step(self, number: int) -> Iterator[None]:
        """Return a context for a step, which is profiled if that is asked for. A report that cannot be written does not end the run."""
        if number not in self._steps:
            yield
            return
        _synchronize()  # the step before
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, profile_memory=True, acc_events=True) as found:
            yield
            _synchronize()
        try:
            self._write(found, number)
        except OSError as error:
            log.warning("step %d: the profile was not written: %s", number, error)

    def _write(self, found: profile, number: int) -> None:
        """Write the trace and the report."""
        self._folder.mkdir(exist_ok=True)
        trace = self._folder / f"step-{number:08d}-rank-{self._rank:05d}.json.gz"
        partial = trace.with_name(f".{trace.name.removesuffix('.json.gz')}.partial.json.gz")
        try:
            found.export_chrome_trace(str(partial))
            summary = trace_report.read(partial)
            os.replace(partial, trace)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=key, row_limit=_OPERATIONS, max_name_column_width=60)
        head = f"step {number}, rank {self._rank} on {socket.gethostname()}; the profiler itself takes a part of the time"
        report = trace.with_name(trace.name.replace(".json.gz", ".txt"))
        with atomic_file(report, "w", parents=False) as handle:
            handle.write(f"{head}\n{summary}\n\n{_OPERATIONS} most expensive operations, by their own time\n{table}\n")
        log.info("step %d: profile of rank %d in %s", number, self._rank, report)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
