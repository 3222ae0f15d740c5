"""What the processes of tools/bench_checkpoint share: the training job, its state, plain files as the yardstick, and cold files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Settings of the measured model: Llama with 418 M parameters, whose state in fp32 is 5.0 GB; and of the one of --small.
MODELS = {
    False: (
        *("model=llama-tiny", "model.hidden=1024", "model.layers=24", "model.heads=16", "model.kv_heads=16", "model.ffn_hidden=2816"),
        *("model.vocab_size=53248", "model.tie_embeddings=false"),
    ),
    True: ("model=llama-tiny",),
}
#: Bytes that a plain read or write handles at a time.
CHUNK = 1 << 24


def configuration(options: dict[str, Any], *more: str) -> Any:
    """The checked configuration of the job.

    Args:
        options: of the benchmark; `small`, `sequence`, `run_dir` and `ranks` (default 1) are read.
        more: overrides.
    """
    from tools.jobs import configured

    return configured(
        *(*MODELS[options["small"]], "precision=fp32", f"run_dir={options['run_dir']}", "training.steps=1000"),
        *("training.document_mask=false", f"training.sequence_length={options['sequence']}", "parallel.zero_stage=0"),
        *("training.global_batch_size=1", "training.micro_batch_size=1", *more),
        ranks=options.get("ranks", 1),
    )


def batches(config: Any) -> Iterator[tuple[Tensor, Any]]:
    """Random tokens and targets, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    while True:
        text = torch.randint(config.model.vocab_size, (1, config.training.sequence_length + 1), generator=generator)
        yield text[:, :-1].contiguous(), {"targets": text[:, 1:].contiguous()}


def state_of(trainer: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint, as fp32 views in the shapes of this rank's pieces: kind/weight -> tensor. Without ZeRO alone."""
    fragments = trainer.engine.fragments()
    return {f"{kind}/{f.piece.name}": tensor.detach().view(f.piece.shape) for f in fragments for kind, tensor in f.tensors.items()}


def checksums(state: dict[str, Tensor]) -> dict[str, int]:
    """The sum of the 32-bit words of each tensor, to tell which state a checkpoint holds; the sums of slices add up."""
    return {name: int(tensor.view(torch.int32).sum(dtype=torch.int64)) for name, tensor in state.items()}


def plain_write(path: Path, state: dict[str, Tensor]) -> float:
    """Write the bytes of all tensors to one file and fsync it. Returns seconds."""
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as handle:
        for tensor in state.values():
            data = tensor.view(-1).numpy().data.cast("B")
            for start in range(0, len(data), CHUNK):
                part = data[start : start + CHUNK]
                while part:
                    part = part[handle.write(part) :]
        os.fsync(handle.fileno())
    return time.perf_counter() - started


def plain_read(paths: list[Path], rank: int = 0, ranks: int = 1) -> None:
    """Read this rank's share of the bytes of each file, from the first to the last."""
    buffer = memoryview(bytearray(CHUNK))
    for path in paths:
        size = path.stat().st_size
        at, stop = rank * size // ranks, (rank + 1) * size // ranks
        with open(path, "rb", buffering=0) as handle:
            handle.seek(at)
            while at < stop:
                at += handle.readinto(buffer[: stop - at])


def evict(folder: Path) -> None:
    """Take the files of a folder out of the page cache, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)  # a page that has not been written stays
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def disk_bytes(folder: Path) -> int:
    """Bytes that the files of a folder occupy on the disk."""
    return sum(path.stat().st_blocks * 512 for path in files(folder))


def bytes_read() -> int:
    """Bytes that this process has read from files so far, whether or not they came from the disk (not those of mapped files)."""
    return int(next(line.split()[1] for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines() if line.startswith("rchar")))
