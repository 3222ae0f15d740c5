"""A backend of torch.distributed: gloo with one thread for each group, so that the collectives of a group run one after another.

torch gives a gloo group two threads. Both write the name of the collective that they have ended to one string of the group, without a
lock (`lastCompletedWorkName` in ProcessGroupGloo::runLoop, torch 2.13): now and then one writes to memory that the other has freed, and the
process ends some time later, with "malloc(): unaligned tcache chunk detected" or a segmentation fault. Options of gloo groups are ignored,
but not those of a backend that torch does not know.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store

#: Its name, for init_process_group and new_group.
SERIAL_GLOO = "serial_gloo"


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Create what torch creates for "gloo", with one thread."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # no stub
    options._devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [ProcessGroupGloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


dist.Backend.register_backend(SERIAL_GLOO, _create, devices=["cpu"])
