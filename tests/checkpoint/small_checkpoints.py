"""Small checkpoints of both formats from arrays, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pipeline.checkpoint import checked_json, commit, data_file, native
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.parts import Box, Part
from pipeline.checkpoint.records import write_record
from pipeline.common.atomic_files import digest
from pipeline.parallel.pieces import Piece, Slice

#: Weight -> kind -> full tensor.
State = dict[str, dict[str, np.ndarray]]
DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64"}


def state(seed: int = 0) -> State:
    """Two trained weights, and a frozen one in another dtype."""
    rng = np.random.default_rng(seed)
    trained = {"a.weight": (16, 12), "b.bias": (20,)}
    found: State = {name: {kind: rng.normal(size=shape).astype("f4") for kind in ("weight", "exp_avg")} for name, shape in trained.items()}
    return {**found, "c.frozen": {"weight": rng.normal(size=(3, 2)).astype("f2")}}


def index(step: int, **settings: Any) -> Index:
    config = {"run_dir": "runs/x", "training": {"seed": 0, "steps": 10}, "optimizer": {"lr": 0.001}, **settings}
    return Index(TrainState(step, 4 * step, step), config, layout={"world_size": 2, "tensor": 2}, versions={"torch": "2"})


def write(
    run_dir: Path, tensors: State, step: int, writers: int = 2, *, columns: bool = False, block_bytes: int = 64, **settings: Any
) -> Path:
    """Write a checkpoint of format 2; the last dim of a matrix is divided between the writers, or its first one."""
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    folder = commit.begin(run_dir, index(step, **settings), "attempt", writers)
    for writer in range(writers):
        arrays: list[dict[str, np.ndarray]] = []
        parts: list[Part] = []
        for name, kinds in tensors.items():
            shape = kinds["weight"].shape
            dim = len(shape) - 1 if columns else 0
            first, last = (shape[dim] * number // writers for number in (writer, writer + 1))
            box: Box = tuple((first, last) if d == dim else (0, size) for d, size in enumerate(shape))
            count = prod(stop - start for start, stop in box)
            if count:
                parts.append(Part(name, shape, box, 0, count, block_bytes, {kind: DTYPES[a.dtype.name] for kind, a in kinds.items()}))
                arrays.append({kind: np.ascontiguousarray(a.take(range(first, last), dim)) for kind, a in kinds.items()})

        def read(number: int, kind: str, arrays: list[dict[str, np.ndarray]] = arrays) -> Iterator[memoryview]:
            yield memoryview(arrays[number][kind]).cast("B")

        write_record(folder, writer, [data_file.write(folder / f"rank-{writer:05d}.safetensors", parts, read)])
    return commit.commit(run_dir)


def write_format_1(run_dir: Path, tensors: State, step: int, **settings: Any) -> Path:
    """Write a checkpoint of format 1, whose matrices are divided along their rows between two ranks."""
    folder = native.folder_of(run_dir, step)
    folder.mkdir(parents=True)
    files = {}
    for rank in range(2):
        fragments, geometry = {}, {}
        for name, kinds in tensors.items():
            shape = kinds["weight"].shape
            first, last = (shape[0] * number // 2 for number in (rank, rank + 1))
            piece = Piece(name, shape, (Slice("tensor", 0, first, last),))
            fragments |= {native.tensor_key(kind, name): array[first:last].reshape(-1) for kind, array in kinds.items()}
            geometry[name] = native.describe(piece, 0, piece.elements)
        path = folder / f"rank-{rank:05d}.safetensors"
        save_file(fragments, path, {"fragments": json.dumps(geometry)})
        files[path.name] = {"bytes": path.stat().st_size, "xxh3": digest(path)}
    whole = asdict(index(step, **settings))
    content = {key: whole[key] for key in ("train_state", "config", "data")} | {"files": files, "kinds": ["weight", "exp_avg"]}
    checked_json.write(folder / native.INDEX, content)
    return folder
