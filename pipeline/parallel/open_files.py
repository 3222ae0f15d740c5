"""The number of files and sockets that the processes of a job may open."""

from __future__ import annotations

import logging
import os
import resource

from pipeline.common.errors import UserError

log = logging.getLogger("pipeline")

#: Connections of a rank to the store of the job, which rank 0 hosts: its process groups, its watchdog, and on GPUs NCCL's monitor.
LEAST, MOST = 2, 3
#: Files that rank 0 opens besides: libraries, data, devices, and sockets of gloo and NCCL.
OWN = 256


def allow_many_connections() -> None:
    """Let gloo connect two ranks when they first communicate, instead of each with all others, and raise the number of files to the limit.

    The default group would otherwise need a file for every rank of the job, where 1,024 are usual, and two requests to one store for
    every pair. The store, which rank 0 hosts, still has connections of all ranks.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_store(world_size: int, limit: int | None = None) -> None:
    """Refuse, on the rank that hosts the store, a job with more connections to it than this process may open; warn of one that may have.

    Args:
        limit: files that this process may open; its hard limit when None.

    Raises:
        UserError: the connections of all ranks exceed the limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    least, most = LEAST * world_size + OWN, MOST * world_size + OWN
    if limit == resource.RLIM_INFINITY or limit >= most:
        return
    rule = f"is the hard limit of open files of rank 0, whose store has {LEAST} to {MOST} connections to each of {world_size:,} ranks"
    fix = f"raise the hard limit of the nodes' jobs to {most:,} (LimitNOFILE of slurmd, or nofile in limits.conf), or use fewer ranks"
    if limit < least:
        raise UserError.of("ulimit -Hn", limit, rule, fix)
    log.warning("ulimit -Hn=%d: %s; %s", limit, rule, fix)
