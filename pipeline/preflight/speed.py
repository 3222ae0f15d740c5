"""Speed of a rank's device and of all-reduces: the fastest of several repetitions, so that one disturbance does not count.

What is slow all the time, such as a GPU with reduced clocks or a core that another process uses, is slow in every repetition.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

REPETITIONS = 5
#: Width of the square matrices and products in a repetition, on a GPU (bf16: 0.01 to 0.1 s) and on a CPU (fp32: 0.01 to 0.1 s).
_PRODUCTS = {"cuda": (8192, 10), "cpu": (1024, 2)}
#: Elements of an all-reduce, fp32: 256 MB, as a large bucket of gradients, and 4 MB.
_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}


def _fastest(call: Callable[[], object], device: torch.device, prepare: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest repetition, without its preparation; the first one warms up and is not counted."""
    times = []
    for _ in range(REPETITIONS + 1):
        prepare()
        _synchronize(device)
        started = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_product(device: torch.device) -> float:
    """Milliseconds of one matrix product; two ranks are compared by it only on devices of one kind."""
    width, count = _PRODUCTS[device.type]
    a = torch.randn(width, width, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)  # zeros draw less power
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    return 1e3 * _fastest(products, device) / count


def all_reduce(device: torch.device, group: ProcessGroup | None = None) -> float:
    """Bandwidth of an all-reduce in GB/s, as of a ring: 2 (n - 1) / n times the size, divided by the time.

    Raises:
        RuntimeError: the sum is wrong, or the backend failed.
    """
    size = dist.get_world_size(group)
    tensor = torch.ones(_ELEMENTS[device.type], device=device)
    seconds = _fastest(lambda: dist.all_reduce(tensor, group=group), device, lambda: tensor.fill_(1))
    if not bool((tensor == size).all()):
        raise RuntimeError(f"an all-reduce of ones over {size} ranks gave other numbers than {size}")
    return 2 * (size - 1) / size * tensor.numel() * tensor.element_size() / seconds / 1e9


def clock_readings(device: torch.device) -> list[float]:
    """This node's clock in seconds since 1970, read just after each of several collectives that all ranks leave together."""
    tensor, readings = torch.zeros(1, device=device), []
    for _ in range(REPETITIONS):
        dist.all_reduce(tensor)
        _synchronize(device)
        readings.append(time.time())
    return readings


def memory(device: torch.device) -> list[float] | None:
    """Total and free memory of a GPU in GB (10^9 bytes), None of a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return [round(total / 1e9, 2), round(free / 1e9, 2)]


def identity(device: torch.device, local_rank: int) -> str | None:
    """What distinguishes a GPU from the others of its node, None of a CPU; AMD's have no UUID that does."""
    if device.type != "cuda":
        return None
    return str(local_rank) if torch.version.hip else str(torch.cuda.get_device_properties(device).uuid)
