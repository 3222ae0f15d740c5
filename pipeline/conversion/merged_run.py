"""The run directory of a merged checkpoint: config.yaml, tokenizer and imported model are those of the newest member."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipeline.checkpoint import native
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.atomic_files import atomic_file, atomic_folder, make_folder
from pipeline.common.errors import UserError
from pipeline.conversion import imported

#: Files and folders of a run directory.
CONFIG, TOKENIZER = "config.yaml", "tokenizer"


def find_complete(run_dir: Path, step: int, parent: dict[str, Any]) -> Path | None:
    """Return the merged checkpoint if it is complete already.

    Args:
        run_dir: the run directory.
        step: of the merged checkpoint.
        parent: Index.parent of the merged checkpoint.

    Raises:
        UserError: the directory has other checkpoints, or cannot be written.
    """
    complete, path = native.complete(run_dir), native.folder_of(run_dir, step)
    if not complete:
        make_folder(run_dir)
        return None
    if path in complete and native.read_index(path).parent == parent:
        return path
    rule = f"contains the checkpoints of another run, the newest of step {native.step_of(complete[-1])}"
    raise UserError.of("--output", run_dir, rule, "choose a new run directory")


def write_settings(newest: Checkpoint, run_dir: Path) -> dict[str, Any]:
    """Write what the stages read of a run directory beside its checkpoints, and return the configuration for its checkpoint.

    Args:
        newest: the newest member.
        run_dir: the run directory.
    """
    source, config = newest.path.resolve().parent.parent, {**newest.config, "run_dir": str(run_dir)}
    tokenizer = dict(config.get("tokenizer", {}))
    if (source / TOKENIZER / "tokenizer.json").is_file():  # with the chat template of the run
        with atomic_folder(run_dir / TOKENIZER) as folder:
            shutil.copytree(source / TOKENIZER, folder, dirs_exist_ok=True)
        tokenizer["path"] = str(run_dir / TOKENIZER)
    imported.carry(newest.path, run_dir)
    with atomic_file(run_dir / CONFIG, "w") as handle:
        handle.write(OmegaConf.to_yaml(OmegaConf.create({**config, "tokenizer": tokenizer})))
    return config
