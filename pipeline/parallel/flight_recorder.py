"""PyTorch's flight recorder: the last NCCL collectives of a rank, to find the one that a rank did not join."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import torch

log = logging.getLogger("pipeline")

#: Prefix of the files, which PyTorch reads too. Set by the job (launch/site.py).
FILE = "TORCH_FR_DUMP_TEMP_FILE"
_SECONDS = 10.0


def dump(rank: int) -> None:
    """Write the record of this rank where PyTorch would when a collective times out; torchfrtrace reads it. Nothing without NCCL or FILE.

    Takes at most 10 s: the process may hang in a driver.
    """
    if os.environ.get(FILE):
        writer = threading.Thread(target=_write, args=(Path(f"{os.environ[FILE]}{rank}"),), daemon=True)
        writer.start()
        writer.join(_SECONDS)


def _write(file: Path) -> None:
    """Write the record."""
    record = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if record is None:  # a build without NCCL
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(record())
    except OSError as error:
        log.warning("the record of collectives cannot be written to %s: %s", file, error)
