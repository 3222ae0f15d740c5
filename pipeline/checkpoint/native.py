"""The index of a checkpoint: what it contains, and which files hold it. Imports no torch.

A checkpoint is a folder `step-00000100` with data files (data_file.py), parts.npy (parts.py) and index.json. README.md has the format.
Checkpoints of format 1, which have no parts.npy, are read, too: their files are described by the headers of the files.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

from pipeline.checkpoint import catalog, checked_json
from pipeline.checkpoint.catalog import INDEX, complete, folder_of, step_of
from pipeline.checkpoint.data_file import FileEntry
from pipeline.common.errors import DamagedCheckpointError, UserError
from pipeline.common.git_commit import commit
from pipeline.config import paths, renamed
from pipeline.parallel.pieces import Piece, Slice

#: Names of the other files that are names of this one, too.
__all__ = ["INDEX", "FileEntry", "complete", "folder_of", "step_of"]

PARTS = "parts.npy"
#: Advice for a damaged checkpoint.
REMEDY = "use an older checkpoint; a run continues from the previous one with checkpoint.skip_damaged=true, or if you remove the folder"
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
class TensorEntry:
    """A weight of a checkpoint.

    Attributes:
        shape: of the full weight.
        dtypes: kind -> name of its dtype in safetensors; kinds that are not stored are zero.
        rows: its first and last + 1 row of parts.npy.
        rows_xxh3: checksum of these rows, hexadecimal.
        digests: kind -> checksum of the checksums of its parts in the order of the rows, hexadecimal. Two checkpoints that a weight is
            divided alike in have the same digest exactly if they have the same values; it differs if the weight is divided otherwise.
    """

    shape: tuple[int, ...]
    dtypes: dict[str, str]
    block_bytes: int
    rows: tuple[int, int]
    rows_xxh3: str
    digests: dict[str, str]


@dataclass(frozen=True)
class PartsEntry:
    """Size in bytes and checksum (xxh3-64, hexadecimal) of parts.npy."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Index:
    """Content of the index file.

    Attributes:
        config: the resolved configuration as nested dictionaries.
        data: fingerprint of the token shards that the samples came from.
        kinds: what is stored of a weight: "weight" and the optimizer's state; state that is not stored is zero.
        files: the data files; a row of parts.npy names a file by its position here.
        tensors: name of a weight -> its entry; empty in format 1.
        parts: of parts.npy; None in format 1.
        layout: of the job: "world_size", "zero_stage" and the sizes of the mesh axes.
        versions: of torch, deepspeed and this software ("commit").
        parent: the checkpoint that this one comes from, "path", "step", "how" (fork, merge, convert) and "growth"; None for the same run.
        format: 2, or 1.
    """

    train_state: TrainState
    config: dict[str, Any]
    data: str = ""
    kinds: list[str] = field(default_factory=list)
    files: list[FileEntry] = field(default_factory=list)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    parts: PartsEntry | None = None
    layout: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    parent: dict[str, Any] | None = None
    format: int = 2


def new_index(state: TrainState, settings: dict[str, Any], data: str, world_size: int) -> Index:
    """The index of a checkpoint that a job begins to write.

    Args:
        settings: the resolved configuration as nested dictionaries.
        data: fingerprint of the token shards.
    """
    sizes = {axis: int(settings["parallel"][axis]) for axis in ("pipeline", "expert", "context", "tensor")}
    layout = {
        "world_size": world_size,
        "zero_stage": settings["parallel"]["zero_stage"],
        **sizes,
        "data": world_size // prod(sizes.values()),
    }
    return Index(state, settings, data, layout=layout)


@cache
def versions() -> dict[str, str]:
    """Versions of the packages that compute a checkpoint, and of this software; without those that are not installed."""
    installed = {}
    for package in ("torch", "deepspeed"):
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed | {"commit": commit() or "unknown"}


def tensor_key(kind: str, name: str) -> str:
    """Key of a fragment in a file of format 1."""
    return f"{kind}/{name}"


def describe(piece: Piece, start: int, count: int) -> dict[str, Any]:
    """Geometry of a fragment, as stored in the header of a file of format 1."""
    return {"shape": list(piece.full_shape), "cuts": [[c.axis, c.dim, c.start, c.stop] for c in piece.slices], "run": [start, count]}


def piece_of(name: str, geometry: dict[str, Any]) -> tuple[Piece, int, int]:
    """Return (piece, start, count) of a fragment of format 1 from its geometry."""
    start, count = geometry["run"]
    return Piece(name, tuple(geometry["shape"]), tuple(Slice(*values) for values in geometry["cuts"])), start, count


def find(run_dir: Path, which: str, key: str = "stage.checkpoint") -> Path:
    """Return the path of the requested checkpoint.

    Args:
        which: "latest", or the path of a checkpoint.
        key: the configuration key that requests it, for the message.

    Raises:
        UserError: it does not exist.
    """
    if which == "latest":
        folders = complete(run_dir)
        if not folders:
            fix = f"set run_dir to that of a run, or run stage=pretrain with {run_dir} first"
            raise UserError.of("run_dir", run_dir, "contains no checkpoint", fix)
        return with_index(folders[-1])
    if not (Path(which) / INDEX).is_file():
        raise UserError.of(key, which, "is not a complete checkpoint", "name a folder such as run_dir/checkpoints/step-00001000")
    return Path(which)


def find_start(where: str, key: str, fix: str) -> Path:
    """Return the checkpoint that a key names: a checkpoint folder, RUN/step-300, or a run directory, of which the newest is taken.

    Raises:
        UserError: there is none.
    """
    folder = Path(where)
    if (folder / INDEX).is_file():
        return folder
    run_dir, step = paths.split(folder)
    folders = complete(run_dir)
    if step is None and folders:
        return with_index(folders[-1])
    if (named := folder_of(run_dir, step or 0)) in folders:
        return with_index(named)
    if folders:
        steps = ("..., " if len(folders) > 10 else "") + ", ".join(str(step_of(path)) for path in folders[-10:])
        raise UserError.of(key, where, f"is not a complete checkpoint; {run_dir} has those of steps {steps}", fix)
    raise UserError.of(key, where, "contains no checkpoint", fix)


def with_index(folder: Path) -> Path:
    """Return a complete checkpoint of a run; raises DamagedCheckpointError if its index was lost."""
    if not (folder / INDEX).is_file():
        raise unreadable(folder, folder / INDEX, "is missing")
    return folder


def damaged(run_dir: Path) -> list[Path]:
    """Return the damaged checkpoints of a run that set_aside has renamed."""
    return sorted((run_dir / "checkpoints").glob("step-*.damaged*"))


def set_aside(folder: Path, why: str = "damaged") -> Path:
    """Rename a damaged or abandoned checkpoint, so that it is not used again, and return its new path.

    The caller holds the lock of the run directory.
    """
    names = (folder.with_name(f"{folder.name}.{why}{suffix}") for suffix in ("", *(f"-{number}" for number in range(2, 100))))
    aside = folder.rename(next(path for path in names if not path.exists()))
    run_dir = folder.parents[1]
    known = catalog.read(run_dir)
    catalog.write(run_dir, replace(known, complete=[step for step in known.complete if step != step_of(folder)]))
    return aside


def write_index(folder: Path, index: Index, name: str = INDEX) -> None:
    """Write the index; INDEX marks the checkpoint as complete."""
    checked_json.write(folder / name, asdict(index))


def read_index(folder: Path, name: str = INDEX) -> Index:
    """Read the index of a checkpoint of format 1 or 2.

    Raises:
        DamagedCheckpointError: it is not readable, or of another step than the folder.
    """
    try:
        content = checked_json.read(folder / name)
        state = TrainState(**(content.pop("train_state", None) or content.pop("progress")))  # its name in older checkpoints
        if re.fullmatch(r"step-\d+", folder.name) and state.step != step_of(folder):
            raise ValueError(f"it is of step {state.step}: rename the folder to {folder_of(Path(), state.step).name}")
        renamed.update(content["config"])
        if content.setdefault("format", 1) == 1:
            files = [FileEntry(name, entry["bytes"], entry["xxh3"]) for name, entry in sorted(content.pop("files").items())]
            return Index(state, files=files, **content)
        if content["format"] != 2:
            raise ValueError(f"its format {content['format']} is of a newer version of this software")
        files = [FileEntry(**entry) for entry in content.pop("files")]
        named = content.pop("tensors").items()
        tensors = {name: TensorEntry(**{**entry, "shape": tuple(entry["shape"]), "rows": tuple(entry["rows"])}) for name, entry in named}
        parts = None if (entry := content.pop("parts")) is None else PartsEntry(**entry)
        return Index(state, files=files, tensors=tensors, parts=parts, **content)
    except FileNotFoundError as error:
        raise unreadable(folder, folder / name, "is missing") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(folder, folder / name, f"is not readable: {error}") from error


def unreadable(folder: Path, where: Path, rule: str, fix: str = REMEDY) -> DamagedCheckpointError:
    """The error of a checkpoint that cannot be read. If its folder is gone, a run has removed it while it was read.

    Args:
        where: its file that is damaged, or the folder.
        fix: advice, unless the folder is gone.
    """
    if folder.is_dir():
        return DamagedCheckpointError.of("checkpoint", where, rule, fix)
    rule = "does not exist; the job of a run removes the checkpoints that checkpoint.keep and checkpoint.keep_every do not keep"
    fix = "use a newer checkpoint, or `tools/checkpoint keep PATH NAME` before you read one, which keeps it for ever"
    return DamagedCheckpointError.of("checkpoint", folder, rule, fix)
