"""The result of one node: a JSON file in a folder that all nodes share, or a line of standard output where the file cannot be written.

With the network that NCCL chose between nodes, read from its log (NCCL_DEBUG=INFO).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.atomic_files import atomic_file

#: Providers of libfabric that are sockets of the kernel.
_SOCKET_PROVIDERS = ("tcp", "sockets", "udp", "net")
SOCKET = "Socket"
Result = dict[str, Any]
#: What a node has done, in this order; its file names the last one.
PHASES = ("started", "local", "connected", "inside", "between", "complete")
#: Begins the line of standard output that holds the result of a node which could not write its file.
MARK = "preflight-result "


@dataclass(frozen=True)
class Network:
    """The network between nodes.

    Attributes:
        name: as NCCL names it: Socket, IB, IBext_v8, AWS Libfabric; None if the log does not say.
        provider: that of libfabric, such as cxi or efa.
        direct: all connections between nodes use GPUDirect RDMA; None if the log names no connection.
    """

    name: str | None = None
    provider: str | None = None
    direct: bool | None = None
    version: str | None = None

    @property
    def is_socket(self) -> bool:
        """Whether the connections are sockets of the kernel, also below libfabric."""
        return self.name == SOCKET or (self.provider or "").partition(";")[0] in _SOCKET_PROVIDERS

    def __str__(self) -> str:
        direct = "" if self.direct is None else ", GPUDirect RDMA" if self.direct else ", without GPUDirect RDMA"
        return f"{self.name or 'unknown'}{f' ({self.provider})' if self.provider else ''}{direct}"


def parse(text: str) -> Network:
    """Read the log of the ranks of a node.

    A connection (`Channel 00/0 : 0[0] -> 4[0] [send] via NET/IB/0/GDRDMA`) counts more than what a rank says when it starts
    (`Using network IB`; `Assigned NET plugin IB to comm` since NCCL 2.27), and that more than the devices that it has found
    (`NET/IB : Using [0]mlx5_0:1/IB`), of which Socket is the last choice. A single socket connection makes the network Socket.
    """
    version = re.search(r"\b[NR]CCL version[: ]+(\S+)", text)
    provider = re.search(r"NET/OFI Selected [Pp]rovider is ([\w;.-]+)", text)
    routes = re.findall(r"\bvia NET/([^/\n]+)/\d+(?:\(\d+\))?(\S*)", text)
    names = Counter(name.strip() for name, _ in routes)
    if not names:
        names.update(
            name.partition(" and target")[0].strip()
            for name in re.findall(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?\s*$", text, re.MULTILINE)
        )
    if not names:
        names.update(name for name in re.findall(r"NCCL INFO NET/(\w+) ?: Using \[0\]", text))
        if len(names) > 1:
            del names[SOCKET]
    name = SOCKET if SOCKET in names else max(names, key=names.__getitem__, default=None)
    direct = all("GDRDMA" in rest for _, rest in routes) if routes else None
    return Network(name, provider[1] if provider else None, direct, version[1] if version else None)


def refused(network: Network, fabric: str | None) -> str | None:
    """Return why a network is not the promised fabric (cluster.fabric); None if it may be, or nothing is promised.

    A plugin may have a suffix (IBext_v8 for IB) or leave a prefix out (Libfabric for AWS Libfabric). Only sockets in place of a fabric
    are refused for certain; a log that names no network is not.
    """
    if not fabric or fabric.lower() == SOCKET.lower() or network.name is None:
        return None
    promised, chosen = fabric.lower(), network.name.lower()
    if network.is_socket:
        return f"NCCL uses {network} between nodes, not {fabric}"
    if chosen.startswith(promised) or promised.endswith(chosen) or promised == (network.provider or "").lower():
        return None
    return f"NCCL uses {network} between nodes, not {fabric}"


def step_id(environment: Mapping[str, str] = os.environ) -> str:
    """The step that a result belongs to, equal on all its ranks: a folder may have results of an earlier one."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    if "SLURM_STEP_ID" in environment:
        return ".".join(environment.get(name, "0") for name in names)
    if "MASTER_PORT" in environment:
        return f"torchrun-{environment['MASTER_PORT']}"
    return f"launcher-{os.getppid()}"  # mpirun on one host, or a shell


def failed_ranks(result: Result) -> list[str]:
    """The ranks of a node that failed or gave no result, with the reason."""
    failed = [f"rank {rank['rank']}: {rank['error']}" for rank in result.get("ranks", ()) if rank["error"]]
    return failed + [f"rank {rank} gave no result" for rank in result.get("missing_ranks", ())]


def path_of(folder: Path, node: str) -> Path:
    """The file of a node."""
    return folder / f"{node}.json"


def write(folder: Path, result: Result) -> None:
    """Write the file of a node, or print its content where that fails, such as on a full disk."""
    text = json.dumps(result)
    try:
        with atomic_file(path_of(folder, result["node"]), "w") as handle:
            handle.write(text)
    except OSError:  # the check of the file system has recorded why
        print(f"\n{MARK}{text}", file=sys.stdout, flush=True)


def read(folder: Path, nodes: Iterable[str], step: str | None = None) -> dict[str, Result]:
    """Read the results of these nodes; a node without a readable file is left out.

    Args:
        nodes: names; no other file is looked at, and the folder is not listed.
        step: leave out results of another step (step_id).
    """
    results = {}
    for node in nodes:
        try:
            result = json.loads(path_of(folder, node).read_bytes())
        except (OSError, ValueError):
            continue
        if step is None or result.get("step") == step:
            results[node] = result
    return results


def printed(output: str) -> dict[str, Result]:
    """Read the results in the output of a step; the last one of each node counts."""
    results = {}
    for line in re.findall(rf"{MARK}(\{{.*)", output):
        try:
            result = json.loads(line)
            results[str(result["node"])] = result
        except (ValueError, KeyError):  # two processes have written at once
            continue
    return results
