"""Which checkpoint a run starts from: its newest one, that of checkpoint.fork, or the weights of checkpoint.initialize_from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.checkpoint import growth, native
from pipeline.checkpoint.native import Index
from pipeline.common.errors import DamagedCheckpointError, UserError
from pipeline.config import loss_weights, paths
from pipeline.config.schema import CheckpointConfig, RunConfig

#: Keys that start a run from a checkpoint of another one; Index.parent of its checkpoints has the name.
FORK, INITIALIZE = "fork", "initialize_from"


def starting_checkpoint(run_dir: Path, checkpoint: CheckpointConfig) -> Path | None:
    """Return the checkpoint that a run continues from, None to start from scratch.

    A run directory has one history. The checkpoint of checkpoint.fork begins it; once the run has written checkpoints of its own, the same
    command continues from the newest one.

    Raises:
        UserError: the requested checkpoint is missing, all are damaged, or the run would not continue from the newest one of run_dir.
    """
    complete, fork = native.complete(run_dir), checkpoint.fork
    if not complete:
        if checkpoint.resume == "auto" and (damaged := native.damaged(run_dir)):  # a run that begins anew would replace their metrics
            rule = f"has no checkpoint to continue from, only damaged ones: {', '.join(path.name for path in damaged)}"
            fix = "choose another run_dir, or set checkpoint.resume=none to start from the beginning"
            raise UserError.of("run_dir", run_dir, rule, fix)
        return None if fork is None else native.find_start(fork, "checkpoint.fork", "set it to a run directory with checkpoints, or to one")
    newest = complete[-1]
    key, value, start = "checkpoint.resume", checkpoint.resume, "starts from scratch"
    if checkpoint.resume == "auto":
        if fork is None or _is_fork(complete, fork):
            return newest
        key, value, start = "checkpoint.fork", fork, "starts a new run"
    rule = f"{start}, but {run_dir} contains checkpoints that do not continue from it, the newest of step {native.step_of(newest)}"
    fix = "choose another run_dir, or continue from the newest: checkpoint.resume=auto without checkpoint.fork"
    raise UserError.of(key, value, rule, fix)


def older_checkpoint(run_dir: Path, damaged: Mapping[Path, UserError]) -> Path:
    """Return the newest checkpoint of a run that is older than its damaged ones (checkpoint -> its error).

    Raises:
        UserError: all are damaged.
    """
    older = [path for path in native.complete(run_dir) if native.step_of(path) < min(map(native.step_of, damaged))]
    if older:
        return older[-1]
    fix = f"no older checkpoint of {run_dir} is left: choose another run_dir, or move the damaged ones away to start from the beginning"
    raise UserError([replace(violation, fix=fix) for error in damaged.values() for violation in error.violations])


def _is_fork(complete: Sequence[Path], fork: str) -> bool:
    """Whether the run that wrote these checkpoints began as this fork; if the fork names a run, at any of its checkpoints."""
    index = _newest_index(complete)
    parent = None if index is None else index.parent
    if parent is None or parent["how"] != FORK:
        return False
    began = Path(parent["path"])
    run_dir, step = paths.split(fork)
    if began == Path(fork).resolve():
        return True
    return paths.split(began)[0] == run_dir.resolve() and step in (None, parent["step"])


def parent_of(config: RunConfig, begin: Path | None) -> dict[str, Any] | None:
    """Return what the checkpoints of a run record of the one of another run that it began with (Index.parent); None without one.

    Args:
        begin: the checkpoint that it continues from, of its own or of checkpoint.fork; None for none.

    Raises:
        UserError: a fork has no step to train, or as growth.of.
    """
    run_dir, settings, how = Path(config.run_dir), config.checkpoint, FORK
    if begin is None and settings.initialize_from is not None:
        begin, how = initial_checkpoint(settings.initialize_from), INITIALIZE
    if begin is None:
        return None
    resumes = is_own(run_dir, begin)
    index = _newest_index([*native.complete(run_dir), begin] if resumes else [begin])
    if index is None or resumes:
        return None if index is None else index.parent
    step = index.train_state.step
    if how == FORK and step >= config.training.steps:
        rule = f"leaves no step to train: checkpoint.fork={begin} is of step {step}, which training.steps counts from the beginning"
        raise UserError.of("training.steps", config.training.steps, rule, f"set it to more than {step}")
    grown = growth.of(config, begin, index.config) if how == INITIALIZE and config.stage.name == "pretrain" else None
    return {"path": str(begin.resolve()), "step": step, "how": how} | ({} if grown is None else {"growth": grown.text})


def first_step_of(parent: dict[str, Any] | None) -> int:
    """Return the first step that a run directory with this Index.parent trains itself; steps of a fork go on with those of its trunk."""
    return 1 if parent is None or parent["how"] != FORK else int(parent["step"]) + 1


def _newest_index(complete: Sequence[Path]) -> Index | None:
    """The index of the last checkpoint whose index is readable; that of a damaged one is reported when it is loaded."""
    for path in reversed(complete):
        with suppress(DamagedCheckpointError):
            return native.read_index(path)
    return None


def is_own(run_dir: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint is one of this run directory, and not of the run that it starts from."""
    return checkpoint.resolve().is_relative_to(run_dir.resolve())


def initial_checkpoint(where: str) -> Path:
    """Return the checkpoint that checkpoint.initialize_from names.

    Raises:
        UserError: there is none.
    """
    return native.find_start(where, "checkpoint.initialize_from", "set it to a run directory with checkpoints, or to one of them")


def with_loss_weights(config: RunConfig, resumed: Path | None) -> RunConfig:
    """Return the configuration with the weights of losses that it leaves open, as the checkpoint that the run starts from has them.

    Args:
        resumed: the checkpoint that it continues from; None for checkpoint.initialize_from, or a start from scratch.

    Raises:
        UserError: checkpoint.initialize_from names no checkpoint.
    """
    start = resumed
    if start is None and config.checkpoint.initialize_from is not None:
        start = initial_checkpoint(config.checkpoint.initialize_from)
    for path in [] if start is None else [start, *reversed(native.complete(Path(config.run_dir)))]:
        with suppress(DamagedCheckpointError):  # it is reported, or replaced by an older one, when it is loaded
            inherited = loss_weights.inherited(config, native.read_index(path).config["training"])
            return replace(config, training=replace(config.training, **inherited))
    return config


def checkpoint_of_finetuning(run_dir: Path, checkpoint: CheckpointConfig) -> Path:
    """Return the checkpoint that a fine-tuning run continues or starts from.

    Raises:
        UserError: there is none.
    """
    if resumed := starting_checkpoint(run_dir, checkpoint):
        return resumed
    if checkpoint.initialize_from is not None:
        return initial_checkpoint(checkpoint.initialize_from)
    rule = f"is required: fine-tuning starts from trained weights, and {run_dir} has none"
    fix = f"name a run directory or checkpoint, or import a model: stage=convert stage.input=FOLDER run_dir={run_dir}"
    raise UserError.of("checkpoint.initialize_from", None, rule, fix)
