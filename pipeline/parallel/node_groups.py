"""Process groups that test the nodes of a job: agreement over a store, then groups inside nodes, of pairs of nodes, and of all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroup, Store, TCPStore

from pipeline.common.ranks import Ranks
from pipeline.parallel import device as rank_device
from pipeline.parallel.open_files import allow_many_connections
from pipeline.parallel.serial_gloo import SERIAL_GLOO


class NotReadyError(Exception):
    """A node has said that it cannot take part; the text names it."""


def join(ranks: Ranks, node: str, problem: str | None, seconds: float) -> Store | None:
    """Tell rank 0 that this node is ready for process groups, or why it is not. All ranks call it; the first one of a node tells.

    The store is that of rank 0. All that a node sends is one number that is counted, and its problem.

    Args:
        ranks: of this process.
        node: name of this node.
        problem: why this node is not ready; None if it is.
        seconds: time limit of the connection.

    Returns:
        The store; None for a job of one process.

    Raises:
        RuntimeError: the store cannot be reached (torch.distributed.DistError and its kinds).
    """
    if ranks.world_size == 1:
        return None
    limit = timedelta(seconds=seconds)
    store = TCPStore(ranks.master_host, ranks.master_port, None, ranks.rank == 0, limit, wait_for_workers=False)
    if ranks.local_rank == 0:
        if problem is not None:
            store.set("problem", f"{node}: {problem}")
        store.add("ready", 1)
    return store


def wait_for_all(store: Store | None, is_first: bool, count: int, seconds: float) -> None:
    """Wait until all nodes are ready.

    Args:
        store: of join().
        is_first: whether this is rank 0, which counts the nodes.
        count: number of nodes.
        seconds: time limit.

    Raises:
        NotReadyError: a node is not, and says why.
        RuntimeError: some have said nothing in this time.
    """
    if store is None:
        return
    deadline = time.monotonic() + seconds
    while is_first and store.add("ready", 0) < count and not store.check(["problem"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    if is_first and (store.check(["problem"]) or store.add("ready", 0) == count):
        store.set("go", store.get("problem").decode() if store.check(["problem"]) else "")
    store.wait(["go"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
    if problem := store.get("go").decode():
        raise NotReadyError(problem)


def connect(ranks: Ranks, store: Store | None, seconds: float) -> torch.device:
    """Create the group of all ranks, with NCCL on GPUs and gloo on CPUs, and return this rank's device.

    Nothing is connected before the first collective: gloo would otherwise connect each rank with all others.

    Raises:
        UserError: another rank uses the GPU of this one.
    """
    device = rank_device.choose(ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    allow_many_connections()
    used: Store = HashStore() if store is None else PrefixStore("preflight", store)
    backend = "nccl" if device.type == "cuda" else SERIAL_GLOO
    dist.init_process_group(backend, store=used, rank=ranks.rank, world_size=ranks.world_size, timeout=timedelta(seconds=seconds))
    if ranks.world_size > 1:
        rank_device.claim(device, ranks.rank, used)
    return device


def group(members: Sequence[int], seconds: float) -> ProcessGroup:
    """Create the group of some ranks, which alone call this; every rank must have created equally many groups before."""
    return dist.new_group(list(members), timeout=timedelta(seconds=seconds), use_local_synchronization=True)
