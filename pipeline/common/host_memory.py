"""Memory of this machine that can be allocated; that of mapped files counts as used until they are closed, or until it is given back."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MADV_DONTNEED = 4


def release(tensor: Tensor) -> None:
    """Give back the pages of a contiguous tensor that is a view of a mapped file; they are read again when the tensor is used.

    Does nothing for a tensor in other memory, whose values would be lost, and on systems without /proc.
    """
    start = tensor.data_ptr()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if tensor.is_contiguous() and first < last and _is_file(first, last):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


def _is_file(first: int, last: int) -> bool:
    """Whether addresses are within the mapping of a file."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
                low, high = (int(address, 16) for address in addresses.split("-"))
                if low <= first and last <= high:
                    return inode != "0"
    except OSError:
        pass
    return False


def available_bytes() -> float:
    """Return the memory of this machine that can be allocated, with its swap space, within --mem of its Slurm job."""
    lines = (line.partition(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    kilobytes = {name: float(value.split()[0]) for name, _, value in lines}
    job = float(os.environ.get("SLURM_MEM_PER_NODE") or "inf")  # MB; of a job with --mem
    return min(1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0.0)), 1024**2 * (job or float("inf")))
