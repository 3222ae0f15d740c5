"""Which checkpoint a run starts from: its newest one, the one that checkpoint.resume names, or that of checkpoint.initialize_from."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.checkpoint import native
from pipeline.common.errors import DamagedCheckpointError, UserError
from pipeline.config import loss_weights
from pipeline.config.schema import CheckpointConfig, RunConfig


def starting_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """Return the checkpoint to resume from, None to start from scratch.

    A run directory has one history. A named checkpoint starts it; once the run has written checkpoints of its own, the same command
    continues from the newest one.

    Args:
        run_dir: the run directory.
        resume: checkpoint.resume.

    Raises:
        UserError: the requested checkpoint is missing, or the run would not continue from the newest checkpoint of run_dir.
    """
    complete = native.complete(run_dir)
    newest = complete[-1] if complete else None
    if resume == "auto" or (newest is not None and _started_by(newest, resume)):
        return newest
    named = None if resume == "none" else native.find(run_dir, resume, "checkpoint.resume")
    if newest is None or (named is not None and named.resolve() == newest.resolve()):
        return named
    start = "starts from scratch" if named is None else "starts from this checkpoint"
    rule = f"{start}, but {run_dir} contains checkpoints that do not continue from it, the newest of step {native.step_of(newest)}"
    raise UserError.of(
        "checkpoint.resume", resume, rule, "choose another run_dir, or set checkpoint.resume=auto to continue from the newest"
    )


def _started_by(newest: Path, resume: str) -> bool:
    """Whether the run that wrote this checkpoint was itself started with this checkpoint.resume."""
    before = native.read_index(newest).config["checkpoint"]["resume"]
    return resume != "none" and before not in ("auto", "none") and Path(before).resolve() == Path(resume).resolve()


def initial_checkpoint(where: str) -> Path:
    """Return the checkpoint that checkpoint.initialize_from names.

    Raises:
        UserError: there is none.
    """
    return native.find_start(where, "checkpoint.initialize_from", "set it to a run directory with checkpoints, or to one of them")


def with_loss_weights(config: RunConfig, resumed: Path | None) -> RunConfig:
    """Return the configuration with the weights of losses that it leaves open, as the checkpoint that the run starts from has them.

    Args:
        config: configuration of the run.
        resumed: the checkpoint that it resumes from; None for checkpoint.initialize_from, or a start from scratch.

    Raises:
        UserError: checkpoint.initialize_from names no checkpoint.
    """
    start = resumed
    if start is None and config.checkpoint.initialize_from is not None:
        start = initial_checkpoint(config.checkpoint.initialize_from)
    for path in [] if start is None else [start, *reversed(native.complete(Path(config.run_dir)))]:
        with suppress(DamagedCheckpointError):  # it is reported, or replaced by an older one, when it is loaded
            found = loss_weights.inherited(config, native.read_index(path).config["training"])
            return replace(config, training=replace(config.training, **found))
    return config


def checkpoint_of_finetuning(run_dir: Path, checkpoint: CheckpointConfig) -> Path:
    """Return the checkpoint that a fine-tuning run continues or starts from.

    Raises:
        UserError: there is none.
    """
    if resumed := starting_checkpoint(run_dir, checkpoint.resume):
        return resumed
    if checkpoint.initialize_from is not None:
        return initial_checkpoint(checkpoint.initialize_from)
    rule = f"is required: fine-tuning starts from trained weights, and {run_dir} has none"
    fix = f"name a run directory or checkpoint, or import a model: stage=convert stage.input=FOLDER run_dir={run_dir}"
    raise UserError.of("checkpoint.initialize_from", None, rule, fix)
