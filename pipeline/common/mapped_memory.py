"""Gives back the memory of mapped files that have been read, which otherwise counts as used memory until the files are closed."""

from __future__ import annotations

import ctypes
import mmap
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
