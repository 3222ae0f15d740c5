"""A backend of torch.distributed: gloo with one thread for each group, so that the collectives of a group run one after another.

torch gives a gloo group two threads. Both write the name of the collective that they have ended to one string of the group, without a
lock (`lastCompletedWorkName` in ProcessGroupGloo::runLoop, torch 2.13): now and then one writes to memory that the other has freed, and the
process ends some time later, with "malloc(): unaligned tcache chunk detected" or a segmentation fault. Options of gloo groups are ignored,
but not those of a backend that torch does not know.

Torch gives each group a device of its own, with a thread that wakes up a hundred times a second, also while nothing is sent (`Loop::run` in
gloo/transport/tcp). Groups share one where they can: those of one rank, and all if they connect at once. Groups that connect when something
is first sent (TORCH_GLOO_LAZY_INIT, set by open_files) name a connection by its rank, and would take that of another group.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store

#: Its name, for init_process_group and new_group.
SERIAL_GLOO = "serial_gloo"


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Create what torch creates for "gloo", with one thread."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # no stub
    apart = size > 1 and os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0"
    options._devices = (_of_interfaces if apart else _shared)(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    options._threads = 1
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _of_interfaces(names: str) -> list[Any]:
    """The devices of network interfaces, whose names are separated by commas."""
    interfaces = [name for name in names.split(",") if name]
    return [ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [ProcessGroupGloo.create_default_device()]


_shared = cache(_of_interfaces)

dist.Backend.register_backend(SERIAL_GLOO, _create, devices=["cpu"])
