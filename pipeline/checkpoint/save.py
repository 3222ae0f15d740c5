"""Saves a checkpoint: every rank its fragments, or one process full weights. An incomplete checkpoint is never visible."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from pipeline.checkpoint import native
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.native import FileEntry, Index
from pipeline.common.atomic_files import apply_umask, atomic_folder, digest, partial_folder, remove_folder
from pipeline.common.errors import UserError


def file_name(rank: int) -> str:
    """File name of a rank."""
    return f"rank-{rank:05d}.safetensors"


def save(run_dir: Path, index: Index, fragments: list[Fragment], keep: int, needed: Callable[[Path], bool] = lambda _: False) -> Path:
    """Write a checkpoint; every rank calls this.

    Ranks write concurrently into a hidden folder. When all have finished, rank 0 adds the index and renames the folder.

    Args:
        run_dir: the run directory.
        index: the index without its files.
        fragments: the fragments of this rank; the owned ones are written.
        keep: number of complete checkpoints to keep; older ones are removed.
        needed: whether an older one is kept, too; called on rank 0.

    Raises:
        UserError: a weight is not finite, or a rank could not write (disk full, quota); the partial checkpoint is removed.
    """
    final = native.folder_of(run_dir, index.train_state.step)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _check_finite(fragments, index.train_state.step)
    with atomic_folder(final) if rank == 0 else nullcontext(partial_folder(final)) as folder:
        dist.barrier()
        answers: list[Any] = [None] * world_size
        dist.all_gather_object(answers, _try_to_write(folder / file_name(rank), [f for f in fragments if f.owned]))
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            raise UserError.of("run_dir", folder, failures[0], "free some space or quota and run again: checkpoint.resume=auto continues")
        if rank == 0:
            files = [entry for entry in answers if entry]
            kinds = list(fragments[0].tensors)  # rank 0 always holds a part of a weight
            native.write_index(folder, replace(index, format=1, files=files, kinds=kinds))
    if rank == 0:
        for old in native.complete(run_dir)[:-keep]:
            if not needed(old):
                remove_folder(old)
    dist.barrier()
    return final


def _check_finite(fragments: list[Fragment], step: int) -> None:
    """Refuse to save weights that are not finite; every rank calls this.

    Raises:
        UserError: on every rank, with the name of such a weight.
    """
    names = (f.piece.name for f in fragments if f.owned and not bool(f.tensors["weight"].detach().isfinite().all()))
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, next(names, None))
    if not_finite := sorted(name for name in answers if name):
        rule = f"{not_finite[0]} contains values that are not finite; no checkpoint was written"
        fix = "reduce optimizer.lr and run again, which continues from the newest checkpoint; metrics.jsonl shows where the loss diverges"
        raise UserError.of("weights after step", step, rule, fix)


def _try_to_write(path: Path, fragments: list[Fragment]) -> FileEntry | str | None:
    """Write and fsync one file. Returns its length and checksum, None without fragments, or the error message."""
    try:
        return _write(path, fragments) if fragments else None
    except Exception as error:  # the other ranks wait for the answer
        return f"could not be written: {error}"


def _write(path: Path, fragments: list[Fragment]) -> FileEntry:
    """Write and fsync one file. Returns its length and checksum."""
    tensors = {native.tensor_key(kind, f.piece.name): f.tensors[kind].detach().cpu().contiguous() for f in fragments for kind in f.tensors}
    geometry = {f.piece.name: native.describe(f.piece, f.start, f.tensors["weight"].numel()) for f in fragments}
    save_file(tensors, path, metadata={"fragments": json.dumps(geometry)})
    apply_umask(path)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileEntry(path.name, path.stat().st_size, digest(path))


def save_full(run_dir: Path, index: Index, fragments: Iterable[Fragment], file_bytes: int) -> Path:
    """Write a checkpoint of full weights in one process, as files of similar size. Memory holds the weights of one file.

    Args:
        run_dir: the run directory.
        index: the index without its files.
        fragments: one per weight, loaded lazily.
        file_bytes: size at which a file is written.

    Raises:
        UserError: a file could not be written; the partial checkpoint is removed.
    """
    final = native.folder_of(run_dir, index.train_state.step)
    files: list[FileEntry] = []
    kinds: list[str] = []
    with atomic_folder(final) as folder:
        for number, group in enumerate(_groups(fragments, file_bytes)):
            kinds = list(group[0].tensors)
            try:
                files.append(_write(folder / file_name(number), group))
            except (OSError, SafetensorError) as error:  # safetensors raises its own class on a full disk
                raise UserError.of("run_dir", folder, f"could not be written: {error}", "free some space or quota and run again") from error
        native.write_index(folder, replace(index, format=1, files=files, kinds=kinds))
    return final


def _groups(fragments: Iterable[Fragment], file_bytes: int) -> Iterator[list[Fragment]]:
    """Group fragments up to the size of a file."""
    group: list[Fragment] = []
    size = 0
    for fragment in fragments:
        group.append(fragment)
        size += sum(tensor.nbytes for tensor in fragment.tensors.values())
        if size >= file_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group
