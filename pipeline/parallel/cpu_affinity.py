"""The CPU cores of a rank: those beside its GPU, so that the host memory of its copies and its threads are on the same socket."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("pipeline")

_DEVICES = Path("/sys/bus/pci/devices")


def bind(device: torch.device, devices: Path = _DEVICES) -> None:
    """Restrict this process to those of its cores that are beside its GPU. Threads and processes that it starts inherit them.

    Only cores that the launcher has given it are used. If these are not beside the GPU, or fewer of them than the process has threads,
    it is not restricted, and a warning names the cores to give it.

    Args:
        device: of the rank; nothing is done for a CPU.
        devices: folder with what Linux knows of PCI devices.
    """
    if device.type != "cuda":
        return
    address, cores = _cores_beside(device, devices)
    given, near = os.sched_getaffinity(0), parse(cores)
    if not near or given <= near:
        return
    if len(given & near) < torch.get_num_threads():
        text = "%d of the %d cores of this rank are beside its GPU (%s): copies between host and GPU are slower; bind it to cores %s"
        log.warning(f"{text} (cluster.srun=[--cpu-bind=...])", len(given & near), len(given), address, cores)
        return
    os.sched_setaffinity(0, given & near)


def cores_beside(device: torch.device, devices: Path = _DEVICES) -> set[int]:
    """Return the numbers of the cores beside a GPU; none where Linux does not tell. Arguments as in bind."""
    return parse(_cores_beside(device, devices)[1])


def _cores_beside(device: torch.device, devices: Path) -> tuple[str, str]:
    """Return the PCI address of a GPU and the list of the cores beside it, which is empty where Linux does not tell."""
    properties: Any = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        return address, (devices / address / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:  # a container without /sys, or a virtual machine
        return address, ""


def parse(cores: str) -> set[int]:
    """Return the numbers of a list of Linux, such as 0-3,8."""
    ranges = [part.split("-") for part in cores.split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}
