"""The native checkpoint format: a folder `step-00000100` with one safetensors file per rank and an index that is written last.

A file contains the fragments that its rank owns (words: parallel/pieces.py), as fp32 "weight",
"exp_avg" and "exp_avg_sq" (an imported model has no moments yet). A frozen weight has no moments, and the dtype of the run. The file's
header stores the position of each fragment in the full weight, so a checkpoint of any layout can be loaded into any other. The index
contains the configuration and counters of the run, and length and checksum of every file.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import DamagedCheckpointError, UserError
from pipeline.config import renamed
from pipeline.parallel.pieces import Piece, Slice

INDEX = "index.json"
#: The kind of tensors of averaged weights (training.ema).
EMA = "ema"


@dataclass(frozen=True)
class TrainState:
    """Progress of a run.

    Attributes:
        step: completed steps, including skipped ones.
        samples: consumed sequences; the next step starts after them.
        updates: optimizer updates; the learning rate depends on these.
        loss_scale: factor of the loss of fp16; 0 in other dtypes.
        finite_steps: consecutive steps with a finite gradient at this loss scale.
    """

    step: int = 0
    samples: int = 0
    updates: int = 0
    loss_scale: float = 0.0
    finite_steps: int = 0


@dataclass(frozen=True)
class Index:
    """Content of the index file.

    Attributes:
        train_state: progress of the run.
        config: the resolved configuration as nested dictionaries.
        data: fingerprint of the token shards that the samples came from.
        files: file name -> {"bytes", "xxh3"}.
        kinds: the tensors that the files hold for each trained weight: "weight" and the optimizer's state; state that they do not hold
            is zero.
    """

    train_state: TrainState
    config: dict[str, Any]
    data: str = ""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)


def file_name(rank: int) -> str:
    """File name of a rank."""
    return f"rank-{rank:05d}.safetensors"


def tensor_key(kind: str, name: str) -> str:
    """Key of a fragment in its file."""
    return f"{kind}/{name}"


def describe(piece: Piece, start: int, count: int) -> dict[str, Any]:
    """Geometry of a fragment, as stored in the file's header."""
    return {"shape": list(piece.full_shape), "cuts": [[c.axis, c.dim, c.start, c.stop] for c in piece.slices], "run": [start, count]}


def piece_of(name: str, geometry: dict[str, Any]) -> tuple[Piece, int, int]:
    """Return (piece, start, count) of a fragment from its geometry."""
    start, count = geometry["run"]
    return Piece(name, tuple(geometry["shape"]), tuple(Slice(*values) for values in geometry["cuts"])), start, count


def folder_of(run_dir: Path, step: int) -> Path:
    """Path of the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder."""
    return int(folder.name.removeprefix("step-"))


def complete(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(f for f in folders if re.fullmatch(r"step-\d{8}", f.name) and (f / INDEX).is_file())


def find(run_dir: Path, which: str, key: str = "stage.checkpoint") -> Path:
    """Return the path of the requested checkpoint.

    Args:
        run_dir: the run directory.
        which: "latest", or the path of a checkpoint.
        key: the configuration key that requests it, for the message.

    Raises:
        UserError: it does not exist.
    """
    if which == "latest":
        folders = complete(run_dir)
        if not folders:
            raise UserError.of("run_dir", run_dir, "contains no checkpoint", f"run stage=pretrain with run_dir={run_dir} first")
        return folders[-1]
    if not (Path(which) / INDEX).is_file():
        raise UserError.of(key, which, "is not a complete checkpoint", "name a folder such as run_dir/checkpoints/step-00001000")
    return Path(which)


def find_start(where: str, key: str, fix: str) -> Path:
    """Return the checkpoint that a configuration key names: a checkpoint folder, or a run directory, of which the newest is taken.

    Raises:
        UserError: there is none.
    """
    folder = Path(where)
    if (folder / INDEX).is_file():
        return folder
    if folders := complete(folder):
        return folders[-1]
    raise UserError.of(key, where, "contains no checkpoint", fix)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not used again, and return its new path."""
    names = (folder.with_name(f"{folder.name}.damaged{suffix}") for suffix in ("", *(f"-{number}" for number in range(2, 100))))
    renamed = next(path for path in names if not path.exists())
    return folder.rename(renamed)


def write_index(folder: Path, index: Index) -> None:
    """Write the index, which marks the checkpoint as complete."""
    with atomic_file(folder / INDEX, "w") as handle:
        content = asdict(index)
        json.dump({**content, "xxh3": _checksum(content)}, handle, indent=1)
        handle.write("\n")


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint.

    Raises:
        DamagedCheckpointError: it is not readable.
    """
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if (checksum := content.pop("xxh3", None)) is not None and checksum != _checksum(content):  # absent in older checkpoints
            raise ValueError("its content does not match its checksum")
        state = content.pop("train_state", None) or content.pop("progress")  # its name in older checkpoints
        renamed.update(content["config"])
        return Index(TrainState(**state), **content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fix = "remove the folder, or set checkpoint.skip_damaged=true, to use an older checkpoint"
        raise DamagedCheckpointError.of("checkpoint", folder / INDEX, f"is not readable: {error}", fix) from error


def _checksum(content: dict[str, Any]) -> str:
    """The checksum of an index."""
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
