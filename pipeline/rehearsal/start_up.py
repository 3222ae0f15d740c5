"""What a rank needs until its first step: seconds, files, requests to the rendezvous store, process groups and communicators."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from pipeline.parallel import rehearsed_group


@dataclass
class StartUp:
    """Figures of this machine, for the ranks of the job.

    Attributes:
        seconds: part -> seconds, in order: imports, process groups, trainer, first step (with what is compiled for it).
        descriptors: files and sockets that the rank has open after the steps, without the connections of gloo and NCCL.
        store: request -> number of those that PyTorch and this package make to the rendezvous store, of this rank; NCCL's own are not
            among them: one for each communicator.
        groups: process groups that this rank is in.
        communicators: of NCCL, which the rank uses: one for a group, and one for each rank that it sends to or receives from.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    descriptors: int = 0
    store: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    communicators: int = 0

    @property
    def until_first_step(self) -> float:
        """Seconds from the begin of the process to the end of its first step."""
        return sum(self.seconds.values())

    def count(self) -> None:
        """Count what is open, made and asked for by now."""
        self.descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
        self.store = dict(sorted(rehearsed_group.store_requests().items()))
        self.groups = len(dist.distributed_c10d._world.pg_map)
        groups = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, rehearsed_group.RehearsedGroup)]
        self.communicators = sum(group.communicators for group in groups)

    def lines(self) -> Iterator[str]:
        """Yield what is printed."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        yield f"start-up: {self.until_first_step:.1f} s until the end of the first step ({parts}; this machine)"
        asked = ", ".join(f"{count:,} {name}" for name, count in self.store.items()) or "none"
        made = f"{self.groups} process groups, {self.communicators} communicators, {self.descriptors} open files"
        yield f"  {made}; requests to the store: {asked}, and NCCL's for each communicator"


def process_age() -> float:
    """Seconds since this process began (Linux: field 22 of /proc/self/stat, in ticks since the boot)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
