"""What every rank of the preflight does: the checks of its own device and node first, then all-reduces inside and between nodes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.common import git_commit
from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config.cluster import ClusterConfig
from pipeline.parallel import device as rank_device
from pipeline.parallel import node_groups
from pipeline.parallel.mesh import destroy_process_group
from pipeline.preflight import file_system, gpu_query, node_result, place, speed
from pipeline.preflight.place import NodePlace, bounded, pairings

log = logging.getLogger("pipeline")
#: Share of the time limit that checks of this node may take: of the file system, the name server, nvidia-smi.
_LOCAL_SHARE = 0.5


def _address(step: str, node: str) -> str:
    """An abstract Unix socket, which leaves no file behind."""
    return f"\0tannschen-preflight-{step}-{node}"


class Gathering:
    """The first rank's end; it must exist before the others send, who wait for it."""

    def __init__(self, step: str, node: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(_address(step, node))
        self._socket.listen(1024)

    def receive(self, count: int, seconds: float) -> list[dict[str, Any]]:
        """Wait for so many results, and return those that arrived in time."""
        results: list[dict[str, Any]] = []
        deadline = time.monotonic() + seconds
        while len(results) < count and (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                break
            with connection, contextlib.suppress(OSError, ValueError):  # a rank that died while it sent
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                results.append(json.loads(_all(connection)))
        return results

    def close(self) -> None:
        """Release the address."""
        self._socket.close()


def _all(connection: socket.socket) -> bytes:
    """What a rank sends until it closes the connection."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def send(step: str, node: str, result: dict[str, Any], seconds: float) -> bool:
    """Send the result of a rank to the first rank of its node, and return whether it was there in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.settimeout(seconds)
            connection.connect(_address(step, node))
            connection.sendall(json.dumps(result).encode())
            return True
        time.sleep(0.05)
    return False


class RankChecks:
    """The checks of one rank. The first rank of a node writes the result of the node.

    Args:
        cluster: host suffix, time limit.
        folder: of the result files; on a file system that all nodes share.
        at_the_limit: called when the time limit has passed, in a thread; the process ends afterwards.
    """

    def __init__(self, cluster: ClusterConfig, ranks: Ranks, place: NodePlace, folder: Path, at_the_limit: Callable[[], None]) -> None:
        self._cluster, self._ranks, self._place, self._folder = cluster, ranks, place, folder
        self._leads = ranks.local_rank == 0
        self._step = node_result.step_id()
        self._deadline = time.monotonic() + cluster.preflight_seconds
        self._logs = Path(tempfile.gettempdir(), f"preflight-{self._step}-{place.node}")
        self.result: node_result.Result = {"node": place.node, "step": self._step, "phase": "started", "error": None}
        self._lock, self._over = threading.Lock(), threading.Event()
        self._timer = threading.Timer(cluster.preflight_seconds, self._at_the_limit, [at_the_limit])
        self._timer.daemon = True

    def run(self) -> bool:
        """Do everything, and return whether the last all-reduce over all ranks succeeded."""
        self._timer.start()
        gathering = Gathering(self._step, self._place.node) if self._leads else None
        self._write()
        self._logs.mkdir(exist_ok=True)
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": f"{self._logs}/%h.%p"}
        try:
            problem = self._local(gathering)
            self._between_nodes(problem)
        except (
            RuntimeError,
            OSError,
            ValueError,
            UserError,
            node_groups.NotReadyError,
        ) as error:  # of torch.distributed, drivers, the store
            if self._over.is_set():  # the process is about to end
                time.sleep(60)
            self.result["error"] = f"after {self.result['phase']}: {_first_line(error)}"
            self._write()
            return False
        finally:
            self._timer.cancel()
            if self._leads:
                shutil.rmtree(self._logs, ignore_errors=True)
        return True

    def _left(self) -> float:
        return max(1.0, self._deadline - time.monotonic())

    def _reached(self, phase: str) -> None:
        with self._lock:
            self.result["phase"] = phase

    def _write(self) -> None:
        with self._lock:
            if self._leads:
                node_result.write(self._folder, self.result)

    def _at_the_limit(self, then: Callable[[], None]) -> None:
        self._over.set()
        self.result["error"] = f"after {self.result['phase']}: the time limit of {self._cluster.preflight_seconds:g} s has passed"
        self._write()
        then()
        os._exit(1)  # the main thread hangs in a collective

    def _local(self, gathering: Gathering | None) -> str | None:
        """The checks that need no other node; the reason why this node cannot take part in collectives."""
        mine = self._device()
        if gathering is None:
            if not send(self._step, self._place.node, mine, self._left()):
                raise RuntimeError("the first rank of this node does not answer")
            return None
        self.result |= self._node()
        members = self._place.members(self._place.index)
        reports = [mine, *gathering.receive(len(members) - 1, self._left() * _LOCAL_SHARE)]
        gathering.close()
        self.result["ranks"] = sorted(reports, key=lambda report: report["rank"])
        self.result["missing_ranks"] = sorted(set(members) - {report["rank"] for report in reports})
        self._reached("local")
        self._write()
        return next(iter(node_result.failed_ranks(self.result)), None)

    def _device(self) -> dict[str, Any]:
        """This rank's device: memory, and the time of a matrix product."""
        report: dict[str, Any] = {"rank": self._ranks.rank, "device": "none", "memory_gb": None, "matmul_ms": None, "error": None}
        try:
            device = rank_device.choose(self._ranks.local_rank)
            report["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            report["gpus_seen"] = torch.cuda.device_count()
            report["gpu"] = speed.identity(device, self._ranks.local_rank)
            report["memory_gb"] = speed.memory(device)
            report["matmul_ms"] = round(speed.matrix_product(device), 3)
            if not self._leads and report["gpus_seen"] == 1:  # the first rank does not see it, either
                report["smi"] = gpu_query.query(self._left() * _LOCAL_SHARE)
        except RuntimeError as error:  # what CUDA raises for a broken GPU
            report["error"] = _first_line(error)
        return report

    def _node(self) -> dict[str, Any]:
        """The checks that one rank does for its node, at once and within their share of the time."""
        seconds = self._left() * _LOCAL_SHARE
        names = [*place.to_resolve(self._place.nodes, self._place.index, self._cluster.host_suffix), socket.gethostname()]
        late = {"error": f"no answer within {seconds:.0f} s"}
        return {"host": socket.gethostname()} | bounded(
            {
                "smi": lambda: gpu_query.query(seconds),
                "file_system": lambda: file_system.check(self._folder),
                "names": lambda: place.resolve(list(dict.fromkeys(names)), seconds * 0.9),
                "versions": versions,
            },
            seconds,
            late,
        )

    def _between_nodes(self, problem: str | None) -> None:
        """The all-reduces, in groups that grow."""
        place, index = self._place, self._place.index
        self._store = node_groups.join(self._ranks, place.node, problem, self._left())  # rank 0 keeps it until its process ends
        self._reached("connected")
        node_groups.wait_for_all(self._store, self._ranks.rank == 0, len(place.nodes), self._left())
        device = node_groups.connect(self._ranks, self._store, self._left())
        inside = node_groups.group(place.members(index), self._left())
        self.result["inside_gb_s"] = round(speed.all_reduce(device, inside), 3) if len(place.members(index)) > 1 else None
        self._reached("inside")
        self.result["between_gb_s"] = {}
        for pairs in pairings(len(place.nodes)):
            pair = next((pair for pair in pairs if index in pair), (index,))
            group = node_groups.group(sorted(rank for node in pair for rank in place.members(node)), self._left())
            if len(pair) == 2:
                other = place.nodes[pair[0] if pair[1] == index else pair[1]]
                self.result["between_gb_s"][other] = round(speed.all_reduce(device, group), 3)
        self._reached("between")
        self.result["clock"] = speed.clock_readings(device)
        self.result["all_gb_s"] = round(speed.all_reduce(device), 3) if self._ranks.world_size > 1 else None
        if device.type == "cuda" and len(place.nodes) > 1 and self._leads:
            text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in self._logs.iterdir())
            self.result["network"] = vars(node_result.parse(text))
        self._reached("complete")
        self._write()
        speed.clock_readings(device)  # all files are written when a rank leaves this
        destroy_process_group()


def versions() -> dict[str, str | None]:
    """What must be equal on all nodes."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    try:
        deepspeed: str | None = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        deepspeed = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "deepspeed": deepspeed,
        "commit": git_commit.commit(),
    }


def _first_line(error: BaseException) -> str:
    text = str(error.violations[0] if isinstance(error, UserError) else error)
    return f"{type(error).__name__}: {text.strip().partition(chr(10))[0][:300]}"
