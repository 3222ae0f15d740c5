"""Which rank of how many this process is, from the variables of torchrun, srun or mpirun. Loads no torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """The place of this process in its job, and where rank 0 listens."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_host: str = "127.0.0.1"
    master_port: int = 29500
    launcher: str = "none"


def detect(environment: Mapping[str, str] = os.environ, host_suffix: str = "") -> Ranks:
    """The place of this process; a lone process when no launcher set the variables.

    Args:
        host_suffix: appended to the first node's name on clusters whose fast network has names of its own.

    Raises:
        UserError: the launcher's variables contradict each other.
    """
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return Ranks(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
            local_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
            master_host=environment["MASTER_ADDR"],
            master_port=int(environment["MASTER_PORT"]),
            launcher="torchrun",
        )
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return _from_slurm(environment, host_suffix)
    if "PMI_SIZE" in environment:
        return Ranks(
            rank=int(environment["PMI_RANK"]),
            world_size=int(environment["PMI_SIZE"]),
            local_rank=int(environment.get("MPI_LOCALRANKID", environment["PMI_RANK"])),
            local_size=int(environment.get("MPI_LOCALNRANKS", environment["PMI_SIZE"])),
            launcher="mpirun",
        )
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return Ranks(
            rank=int(environment["OMPI_COMM_WORLD_RANK"]),
            world_size=int(environment["OMPI_COMM_WORLD_SIZE"]),
            local_rank=int(environment["OMPI_COMM_WORLD_LOCAL_RANK"]),
            local_size=int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"]),
            launcher="mpirun",
        )
    return Ranks()


def _from_slurm(environment: Mapping[str, str], host_suffix: str) -> Ranks:
    """The rank of a task that srun started."""
    world_size = int(environment["SLURM_STEP_NUM_TASKS"])
    first = environment.get("SLURM_LAUNCH_NODE_IPADDR") if world_size == 1 else None
    nodes = expand_hosts(environment.get("SLURM_STEP_NODELIST", socket.gethostname()))
    return Ranks(
        rank=int(environment["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(environment["SLURM_LOCALID"]),
        local_size=world_size // len(nodes),
        master_host=first or nodes[0] + host_suffix,
        master_port=20000 + int(environment["SLURM_JOB_ID"]) % 20000,
        launcher="srun",
    )


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of Slurm's compressed list: `n[1-2,07],x` -> n1, n2, n07, x.

    Raises:
        UserError: the list does not have that form.
    """
    raise UserError.of("SLURM_STEP_NODELIST", nodelist, "not readable yet", "")
