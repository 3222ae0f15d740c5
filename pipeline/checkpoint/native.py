"""The native checkpoint: a folder `step-00000100` with one safetensors file a rank and an index that is written last.

A file holds the fragments that its rank owns: for a weight, a run of elements of the rank's piece of it, as fp32 "weight",
"exp_avg" and "exp_avg_sq" (an imported model has no moments yet). The file's own header says where each belongs in the full
weight, so any layout can be read into any other. The index holds the run's configuration and counters, and every file's length
and checksum.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import renamed
from pipeline.errors import UserError
from pipeline.files import atomic_file
from pipeline.parallel.pieces import Piece, Slice

INDEX = "index.json"


@dataclass(frozen=True)
class TrainState:
    """How far a run is.

    Attributes:
        step: steps done, skipped ones included.
        samples: sequences consumed; the next step takes the ones after them.
        updates: optimizer updates made; the learning rate follows these.
    """

    step: int = 0
    samples: int = 0
    updates: int = 0


@dataclass(frozen=True)
class Index:
    """What the index file holds.

    Attributes:
        train_state: of the run.
        config: the resolved configuration as nested dictionaries.
        data: fingerprint of the token shards that the samples came from.
        files: file name -> {"bytes", "xxh3"}.
        kinds: the tensors that the files hold for each weight: "weight" and the optimizer's state; state that they do not hold is zero.
    """

    train_state: TrainState
    config: dict[str, Any]
    data: str = ""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def tensor_key(kind: str, name: str) -> str:
    """A fragment's key in its file."""
    return f"{kind}/{name}"


def describe(piece: Piece, start: int, count: int) -> dict[str, Any]:
    """A fragment's geometry, for the file's header."""
    return {"shape": list(piece.full_shape), "cuts": [[c.axis, c.dim, c.start, c.stop] for c in piece.slices], "run": [start, count]}


def piece_of(name: str, geometry: dict[str, Any]) -> tuple[Piece, int, int]:
    """The piece of a described fragment, and the run of elements in it: (piece, start, count)."""
    start, count = geometry["run"]
    return Piece(name, tuple(geometry["shape"]), tuple(Slice(*cut) for cut in geometry["cuts"])), start, count


def folder_of(run_dir: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def complete(run_dir: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(f for f in folders if re.fullmatch(r"step-\d{8}", f.name) and (f / INDEX).is_file())


def find(run_dir: Path, which: str, key: str = "stage.checkpoint") -> Path:
    """The checkpoint that a stage is asked to read.

    Args:
        run_dir: of the run.
        which: "latest", or a checkpoint's folder.
        key: the configuration key that asked.

    Raises:
        UserError: there is none.
    """
    if which == "latest":
        found = complete(run_dir)
        if not found:
            raise UserError.of("run_dir", run_dir, "holds no checkpoint", f"run stage=pretrain with run_dir={run_dir} first")
        return found[-1]
    if not (Path(which) / INDEX).is_file():
        raise UserError.of(key, which, "is no complete checkpoint", "name a folder such as run_dir/checkpoints/step-00001000")
    return Path(which)


def write_index(folder: Path, index: Index) -> None:
    """Declare the checkpoint complete."""
    with atomic_file(folder / INDEX, "w") as handle:
        json.dump(asdict(index), handle, indent=1)
        handle.write("\n")


def read_index(folder: Path) -> Index:
    """The index of a checkpoint.

    Raises:
        UserError: it is not readable.
    """
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        state = content.pop("train_state", None) or content.pop("progress")  # its name in older checkpoints
        renamed.update(content["config"])
        return Index(TrainState(**state), **content)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError.of(
            "checkpoint", folder / INDEX, f"is not readable: {error}", "remove the folder and use an older checkpoint"
        ) from error
