"""The device of a rank: one GPU each. Refused are a rank without a GPU on a cluster with GPUs, and two ranks on one GPU of NVIDIA."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import torch
from torch.distributed import Store

from pipeline.common.errors import UserError
from pipeline.config.cluster import ClusterConfig

#: Written by NVIDIA's driver: "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build ...".
DRIVER = Path("/proc/driver/nvidia/version")


def check_gpus(cluster: ClusterConfig) -> None:
    """Refuse to compute on the CPU what the cluster has GPUs for.

    Raises:
        UserError: cluster.gpus_per_node is above 0, and this process finds no GPU.
    """
    if cluster.gpus_per_node == 0 or torch.cuda.device_count():
        return
    rule = f"the nodes of cluster={cluster.name} have GPUs, and this process on {socket.gethostname()} finds none"
    if torch.version.cuda is None and torch.version.hip is None:
        rule += f" (PyTorch {torch.__version__} supports none)"
    elif "CUDA_VISIBLE_DEVICES" in os.environ:
        rule += f" (CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']})"
    elif torch.version.cuda and (driver := _driver()):
        rule += f" (PyTorch {torch.__version__} is built for CUDA {torch.version.cuda}, which the driver {driver} may be too old for)"
    fix = "run it in a job on these nodes (for training, dry_run=true prints the sbatch command); or set cluster=local to use CPUs"
    raise UserError.of("cluster.gpus_per_node", cluster.gpus_per_node, rule, fix)


def _driver() -> str:
    """The version of NVIDIA's driver; empty without one."""
    try:
        text = DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match[0] if match else ""


def choose(local_rank: int) -> torch.device:
    """Return the device of a rank: the GPU with its number among those that it sees, or the CPU without any.

    With one visible GPU per rank (srun --gpus-per-task=1), each of them has number 0.
    """
    count = torch.cuda.device_count()
    return torch.device("cuda", local_rank % count) if count else torch.device("cpu")


def claim(device: torch.device, rank: int, store: Store) -> None:
    """Record in the store of the job that this rank uses its GPU; AMD's are not checked, as nothing says that their UUIDs differ.

    Raises:
        UserError: another rank uses the same GPU.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    instance = visible if visible.startswith("MIG-") else ""  # a process sees one instance; those of a GPU may share its UUID
    key = f"GPU {torch.cuda.get_device_properties(device).uuid} {instance}"
    holder = int(store.compare_set(key, "", str(rank)))
    if holder != rank:
        name = f"{torch.cuda.get_device_name(device)} on {socket.gethostname()}"
        rule = f"uses the same GPU as rank {holder} ({name}, {torch.cuda.device_count()} visible)"
        fix = "start one rank per GPU (srun and sbatch: --ntasks-per-node, torchrun: --nproc-per-node); for CPUs, set CUDA_VISIBLE_DEVICES="
        raise UserError.of("rank", rank, rule, fix)
