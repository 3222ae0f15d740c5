"""The loads of tools/bench_checkpoint: plain reads, ours and DCP's, in the layout of the save or on two tensor-parallel ranks.

usage: checkpoint_loads.py '{"ranks": 1 | 2, "ours": {"checkpoint", "checksums"}, "dcp": {...}, ...}'; prints the results as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeline.certification.distributed import run_ranks
from tools.bench.checkpoint_state import bytes_read, checksums, configuration, evict, files, plain_read, state_of
from tools.jobs import build_trainer


def ours(trainer: Any, path: Path) -> None:
    """The load of a run that resumes."""
    from pipeline.checkpoint import load_any_layout
    from pipeline.checkpoint.reader import Checkpoint

    load_any_layout.load(Checkpoint(path), trainer.engine.fragments())


def dcp(trainer: Any, path: Path) -> None:
    """torch.distributed.checkpoint.load into the same tensors; slices of weights are DTensors."""
    from torch.distributed.checkpoint import FileSystemReader, load

    state: dict[str, Any] = state_of(trainer)
    state |= {name: as_dtensor(state[name], dim) for name, dim in sliced(trainer).items()}
    load(state, storage_reader=FileSystemReader(path))


#: Implementation -> its load.
LOADS = {"ours": ours, "dcp": dcp}


def as_dtensor(local: Tensor, dim: int) -> Any:
    """A slice along a dim as a DTensor over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)], run_check=False)


def sliced(trainer: Any) -> dict[str, int]:
    """kind/weight -> dim of the slice that this rank has."""
    return {f"{kind}/{f.piece.name}": f.piece.slices[0].dim for f in trainer.engine.fragments() for kind in f.tensors if f.piece.slices}


def timed(call: Callable[[], object]) -> dict[str, float]:
    """Seconds until the last rank is done, and the bytes that this rank read. Collective."""
    dist.barrier()
    before, started = bytes_read(), time.perf_counter()
    call()
    read = bytes_read() - before
    dist.barrier()
    return {"seconds": time.perf_counter() - started, "bytes": read}


def measure(options: dict[str, Any], folder: str) -> None:
    """Time the reads and loads on this rank, from the disk and then from the page cache; rank 0 writes the results."""
    rank, ranks = dist.get_rank(), options["ranks"]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        config = configuration(options, f"parallel.tensor={ranks}")
        trainer = build_trainer(config)
        state = state_of(trainer)
        for module in ("torch.distributed.checkpoint", "torch.distributed.tensor", "pipeline.checkpoint.load_any_layout"):
            importlib.import_module(module)  # before the first load is timed
        result: dict[str, Any] = {"needed": sum(tensor.nbytes for tensor in state.values())}
        for name in ("ours", "dcp"):
            path = Path(options[name]["checkpoint"])
            calls: dict[str, Callable[[], object]] = {"plain": partial(plain_read, files(path), rank, ranks)} if name == "ours" else {}
            calls[name] = partial(LOADS[name], trainer, path)
            for label, call in calls.items():
                if rank == 0:
                    evict(path)
                for place in ("disk", "cache"):
                    if label == name:
                        for tensor in state.values():
                            tensor.zero_()
                    result[f"{label} {place}"] = timed(call)
            result[f"{name} equal"] = totals(trainer, state) == options[name]["checksums"]
        dist.barrier()
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))


def totals(trainer: Any, state: dict[str, Tensor]) -> dict[str, int]:
    """The checksums of the full weights. Collective."""
    own, parts = checksums(state), sliced(trainer)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return {name: sum(rank[name] for rank in gathered) if name in parts else value for name, value in own.items()}


def main() -> None:
    options = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(options["ranks"], measure, options, folder)
        print(Path(folder, "result").read_text())


if __name__ == "__main__":
    main()
