"""The run directory of a training job: claimed and cleaned when the job begins, with config.yaml and a manifest when it is done."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped] # PyYAML has no types
from omegaconf import OmegaConf

from pipeline.checkpoint import compatibility
from pipeline.checkpoint.commit import finish_interrupted
from pipeline.checkpoint.native import TrainState
from pipeline.common import artifact, ends
from pipeline.common.atomic_files import atomic_file, remove_leftovers, report_disk_full, sync_folder
from pipeline.common.errors import UserError
from pipeline.common.git_commit import commit
from pipeline.common.locks import claimed
from pipeline.config.schema import CheckpointConfig, RunConfig
from pipeline.conversion import imported
from pipeline.data.tokenize import chat_template
from pipeline.training import rewinds
from pipeline.training.metrics import FILE
from pipeline.training.metrics_writer import last_loss
from pipeline.training.request_files import STOP, remove
from pipeline.training.saves import LAST_WAITS
from pipeline.training.starting_checkpoint import initial_checkpoint, starting_checkpoint

log = logging.getLogger("pipeline")

#: Folder of the tokenizer with the chat template of the run, in its run directory.
TOKENIZER = "tokenizer"


def disk_errors(run_dir: Path) -> AbstractContextManager[None]:
    """Return a context that converts the error of a run directory that cannot be written into a UserError (report_disk_full)."""
    return report_disk_full(run_dir, "run_dir", "training continues from the newest checkpoint")


def claim(run_dir: Path, checkpoint: CheckpointConfig, claims: ExitStack, minutes: float) -> tuple[Path | None, int]:
    """Create and lock a run directory until `claims` is closed; finish the checkpoint that a killed job left, or remove it.

    Args:
        minutes: training.timeout_minutes, the most time to wait for the last checkpoint of the job before.

    Returns:
        The checkpoint to start from, None to start from scratch; and the file descriptor of the lock.

    Raises:
        UserError: the directory cannot be written, another job uses it, or as starting_checkpoint.
        ToBeContinued: as claimed.
    """
    lock = claims.enter_context(claimed(run_dir, "run_dir", minutes=minutes))
    with disk_errors(run_dir):
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        finish_interrupted(run_dir)
        rewinds.drop_abandoned(run_dir)
    if ends.VARIABLE not in os.environ:  # the supervisor of a job has removed it; what is there now was meant for this job
        remove(run_dir / STOP)
    start = starting_checkpoint(run_dir, checkpoint)
    remove_leftovers(run_dir)
    remove_leftovers(run_dir / "checkpoints")
    return start, lock


def write_config(config: RunConfig) -> RunConfig:
    """Write the resolved configuration to run_dir/config.yaml, and return it.

    With tokenizer.chat_template, the tokenizer is written with this template to run_dir/tokenizer, and config.yaml names that folder.
    """
    if config.tokenizer.chat_template is not None and (template := chat_template.of(config.tokenizer)) is not None:
        folder = Path(config.run_dir) / TOKENIZER
        if folder.resolve() != Path(config.tokenizer.path).resolve():
            chat_template.store(template, Path(config.tokenizer.path), folder)
        config = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, path=str(folder)))
    with atomic_file(Path(config.run_dir) / "config.yaml", "w") as handle:
        handle.write(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
    return config


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the resolved configuration of an earlier start; empty if there was none, or its file is damaged."""
    path = run_dir / "config.yaml"
    try:
        content = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if path.is_file() else None
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def carry_original(config: RunConfig, begin: Path | None) -> None:
    """Copy what a run keeps of an imported model, if it starts with a checkpoint of another run.

    Args:
        begin: the checkpoint that it resumes from; None for checkpoint.initialize_from, or the beginning.
    """
    if begin is None and config.checkpoint.initialize_from is not None:
        begin = initial_checkpoint(config.checkpoint.initialize_from)
    if begin is not None:
        imported.carry(begin, Path(config.run_dir))


def begin_training(config: RunConfig, begin: Path | None) -> list[tuple[str, Any, Any]]:
    """Write what a run directory has from the first step on. It is not complete any more: the manifest of a shorter run is removed.

    Args:
        begin: as in carry_original.

    Returns:
        The settings that differ from those of the start before: key, old and new value.
    """
    carry_original(config, begin)
    before = read_config(Path(config.run_dir))
    written = write_config(config)
    manifest = Path(config.run_dir) / artifact.MANIFEST
    if manifest.is_file():
        manifest.unlink()
        sync_folder(manifest.parent)
    return compatibility.changed_settings(before, written) if before else []


def finish_without_training(config: RunConfig, state: TrainState, hosts: list[str], parent: dict[str, Any] | None) -> None:
    """Write the manifest of a run that has no step to train, unless it is there.

    Args:
        state: of the checkpoint that it continues from, of step training.steps or later.
        hosts: as in finish.
        parent: as in finish.

    Raises:
        UserError: the checkpoint is of a later step than training.steps, and no run was completed there.
    """
    run_dir, steps = Path(config.run_dir), config.training.steps
    if state.step > steps and not _is_finished(config, state.step):
        rule = f"the newest checkpoint of {run_dir} is of step {state.step}, beyond it: there is nothing to train, and no run ended there"
        fix = f"set it to more than {state.step} to train on, or choose another run_dir (checkpoint.fork begins it at an earlier step)"
        raise UserError.of("training.steps", steps, rule, fix)
    finish(config, state, hosts, parent)
    more = f", more than training.steps={steps}" if state.step > steps else ""
    log.info("%s: %s has completed %d steps%s, nothing to do", config.stage.name, run_dir, state.step, more)


def _is_finished(config: RunConfig, step: int) -> bool:
    """Whether the run directory has the manifest of a run that ended at a step."""
    run_dir = Path(config.run_dir)
    if not (run_dir / artifact.MANIFEST).is_file():
        return False
    return artifact.read(run_dir, key="run_dir", stage=config.stage.name).totals.get("step") == step


def finish(config: RunConfig, state: TrainState, hosts: list[str], parent: dict[str, Any] | None, unverified: int = 0) -> None:
    """Write the manifest of a completed run, unless it is there.

    Args:
        hosts: host name of each rank.
        parent: Index.parent of its checkpoints.
        unverified: number of token shards whose checksums were not verified.

    Raises:
        UserError: it cannot be written.
    """
    run_dir = Path(config.run_dir)
    if _is_finished(config, state.step):
        return
    settings = json.loads(json.dumps({"model": dataclasses.asdict(config.model), "training": dataclasses.asdict(config.training)}))
    totals = {
        **dataclasses.asdict(state),
        "loss": last_loss(run_dir / FILE, state.step),
        "world_size": len(hosts),
        "hosts": sorted(set(hosts)),
    }
    totals |= {"job": os.environ.get("SLURM_JOB_ID"), "commit": commit()}
    totals |= {} if parent is None else {"parent": parent}
    totals |= {"unverified_shards": unverified} if config.data.verify == "lazy" else {}

    def write() -> None:
        if not (run_dir / "config.yaml").is_file():
            write_config(config)
        files = {"config.yaml": artifact.entry(run_dir / "config.yaml")}
        artifact.write(run_dir, artifact.Manifest(config.stage.name, settings, files, totals))

    with disk_errors(run_dir):
        _write_last(write)


def _write_last(write: Callable[[], None]) -> None:
    """Call a function that writes what a run ends with; after an error try again, as the training that went before is complete."""
    for wait in LAST_WAITS:
        try:
            write()
        except OSError as error:
            log.warning("%s: cannot be written (%s): trying once more in %.0f s", error.filename, error.strerror or error, wait)
            time.sleep(wait)
        else:
            return
    write()
