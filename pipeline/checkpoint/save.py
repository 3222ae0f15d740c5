"""Saves and loads the fragments of a rank. Checkpoints are written atomically: an incomplete one is never visible."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from pipeline.checkpoint import native
from pipeline.checkpoint.consolidate import extract_fragment
from pipeline.checkpoint.fragment import Fragment
from pipeline.checkpoint.native import KINDS, Index
from pipeline.checkpoint.reader import Checkpoint
from pipeline.errors import UserError, Violation
from pipeline.files import digest, publish_folder


def save(run_dir: Path, index: Index, fragments: list[Fragment], keep: int) -> Path:
    """Write a checkpoint; every rank calls this.

    Ranks write concurrently into a hidden folder. When all have finished, rank 0 adds the index and renames the folder.

    Args:
        run_dir: the run directory.
        index: the index without its files.
        fragments: the fragments of this rank; the owned ones are written.
        keep: number of complete checkpoints to keep; older ones are removed.

    Raises:
        UserError: a rank could not write (disk full, quota); the partial checkpoint is removed.
    """
    final = native.folder_of(run_dir, index.train_state.step)
    partial = final.with_name(f".{final.name}.partial")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, _write(partial / native.file_name(rank), [f for f in fragments if f.owned]))
    failures = [answer for answer in answers if isinstance(answer, str)]
    if failures:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError.of("run_dir", partial, failures[0], "free some space or quota and run again: checkpoint.resume=auto continues")
    if rank == 0:
        files = {native.file_name(writer): entry for writer, entry in enumerate(answers) if entry}
        native.write_index(partial, replace(index, files=files))
        publish_folder(partial, final)
        for old in native.complete(run_dir)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def _write(path: Path, fragments: list[Fragment]) -> dict[str, Any] | str:
    """Write and fsync one file. Returns its length and checksum, an empty dict without fragments, or the error message."""
    if not fragments:
        return {}
    tensors = {native.tensor_key(kind, f.piece.name): f.tensors[kind].detach().cpu().contiguous() for f in fragments for kind in f.tensors}
    geometry = {f.piece.name: native.describe(f.piece, f.start, f.tensors["weight"].numel()) for f in fragments}
    try:
        save_file(tensors, path, metadata={"fragments": json.dumps(geometry)})
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        return {"bytes": path.stat().st_size, "xxh3": digest(path)}
    except Exception as error:  # safetensors raises its own class on a full disk; the other ranks wait for the answer
        return f"could not be written: {error}"


def load(checkpoint: Checkpoint, fragments: list[Fragment]) -> None:
    """Read a checkpoint of any layout into this rank's fragments, in place; every rank calls this.

    Raises:
        UserError: on every rank, with the violations of all ranks: a file is missing or corrupt, a weight is missing or has another shape.
    """
    found: tuple[Violation, ...] = ()
    try:
        _read(checkpoint, fragments)
    except UserError as error:
        found = error.violations
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, found)
    violations = list(dict.fromkeys(violation for answer in answers for violation in answer))
    if violations:
        raise UserError(violations)


@torch.no_grad()
def _read(checkpoint: Checkpoint, fragments: list[Fragment]) -> None:
    """Read a fragment directly if the file of the same rank holds it; else extract it from the consolidated weight."""
    rank = dist.get_rank()
    for fragment in fragments:
        name, count = fragment.piece.name, fragment.tensors["weight"].numel()
        geometry = native.describe(fragment.piece, fragment.start, count)
        for kind in KINDS:
            values: Tensor | None = checkpoint.fragment(rank, name, geometry, kind)
            if values is None:
                values = extract_fragment(checkpoint.tensor(name, kind), fragment.piece, fragment.start, count)
            fragment.tensors[kind].copy_(values)


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
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an interrupted run
    partial.mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(_groups(fragments, file_bytes)):
        answer = _write(partial / native.file_name(number), group)
        if isinstance(answer, str):
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError.of("run_dir", partial, answer, "free some space or quota and run again")
        files[native.file_name(number)] = answer
    native.write_index(partial, replace(index, files=files))
    publish_folder(partial, final)
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


def check_same_run(checkpoint: Checkpoint, config: dict[str, Any], data: str) -> None:
    """Refuse to resume with another model or other samples; all other settings (layout, batch size, learning rate) may change.

    A checkpoint with zero samples, such as an imported model, can be trained on any data.

    Raises:
        UserError: with one violation per difference.
    """
    found = []
    fresh = checkpoint.train_state.samples == 0
    for group, keys in (("model", config["model"].keys()), ("training", () if fresh else ("seed", "sequence_length"))):
        for key in keys:
            new, old = config[group][key], checkpoint.config[group].get(key)
            if new != old:
                found.append((f"{group}.{key}", new, old))
    if checkpoint.data != data and not fresh:
        keys = [key for key in ("blend", "phases", "packing", "infill") if config["data"][key] != checkpoint.config["data"].get(key)]
        found += [(f"data.{key}", config["data"][key], f"{checkpoint.config['data'].get(key)}") for key in keys]
        if not keys:
            found.append(("data.tokens", config["data"]["tokens"], checkpoint.config["data"]["tokens"] + " with other content"))
    if found:
        fix = "choose another run_dir, or checkpoint.resume=none to train from scratch"
        raise UserError([Violation(k, new, f"{checkpoint.path} was made with {old}", fix) for k, new, old in found])
