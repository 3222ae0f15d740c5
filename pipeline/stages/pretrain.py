"""pretrain: token shards -> checkpoints and metrics.jsonl, on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from pipeline.checkpoint import native
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common import artifact, signals
from pipeline.common.errors import DamagedCheckpointError, ToBeContinued, UserError
from pipeline.common.files import atomic_file, remove_leftovers, report_disk_full
from pipeline.common.locks import claimed
from pipeline.common.ranks import Ranks
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.data.load import blend
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import Objective
from pipeline.launch.evaluation_jobs import Schedule
from pipeline.parallel import mesh as meshes
from pipeline.parallel.parallelize import check_trained
from pipeline.planner.flops import flops_per_token, peak_flops
from pipeline.planner.parameter_counts import count_model_parameters
from pipeline.training import loop, shard_verification, start
from pipeline.training.loop import CheckpointHooks
from pipeline.training.metrics import Metrics, last_loss
from pipeline.training.step_control import StepControl
from pipeline.training.trainer import Trainer
from pipeline.training.watchdog import Watchdog

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Train up to training.steps, starting from the newest checkpoint of the run directory.

    Raises:
        UserError: before training starts: token shards are missing, the vocabulary is too large, run_dir contains another model or is in
            use by another job; during training: too many steps are skipped, or a checkpoint cannot be written.
        ToBeContinued: a signal announced the end of the job, and a checkpoint has been written.
    """
    signals.record(signal.SIGTERM)
    if ranks.rank == 0:
        log.info("%s", _summary(config, ranks))
    if config.checkpoint.initialize_from is not None:
        initial_checkpoint(config.checkpoint.initialize_from)
    evaluations = Schedule(config, HydraConfig.get().overrides.task) if config.evaluation.every else None
    training_data, validation_data = open_data(config, (ranks.rank, ranks.world_size))
    blend.check_epochs(config, training_data.samples)
    minutes = config.training.timeout_minutes
    device = meshes.init_distributed(ranks.rank, ranks.world_size, ranks.local_rank, ranks.rendezvous(), minutes)
    try:
        check_device(config, device)
        with ExitStack() as run_dir, Watchdog(minutes) as watchdog:
            begin = meshes.on_rank_0(lambda: _open_run_dir(config, run_dir))
            if evaluations is not None and ranks.rank == 0:
                evaluations.submit()  # of checkpoints whose evaluation failed, or was not submitted
            hooks = CheckpointHooks(evaluations.is_due, evaluations.waits, evaluations.submit) if evaluations else CheckpointHooks()
            layout = Layout.of(config, ranks.world_size)
            if config.training.frozen or config.lora.rank:
                check_trained(config, layout)
            mesh = meshes.build_mesh(layout, device, minutes)
            trainer = Trainer(config, mesh)
            state = _resume(config, trainer, begin, training_data)
            hosts = _hosts()
            if state.step >= config.training.steps:
                if ranks.rank == 0 and _finish(config, state, hosts):
                    log.info("%s: %s has completed %d steps, nothing to do", config.stage.name, config.run_dir, state.step)
                return
            if ranks.rank == 0:
                _write_config(config)
            length = config.training.sequence_length
            flops, peak = flops_per_token(config.model, length, training_data.decoder_length), peak_flops(config.cluster, device)
            all_peaks = None if peak is None else peak * ranks.world_size
            writer = Metrics(
                Path(config.run_dir),
                config.tracking,
                dataclasses.asdict(config),
                ranks.rank,
                state,
                steps=config.training.steps,
                tokens_per_sample=length,
                flops_per_token=flops,
                peak_flops=all_peaks,
            )
            with report_disk_full(Path(config.run_dir)), writer as metrics:
                control = StepControl(ranks.rank, config.checkpoint.every_minutes, config.training.max_skipped_steps)
                state = loop.train(config, trainer, training_data, validation_data, state, metrics, control, watchdog, hooks)
            unverified = shard_verification.finish([training_data, validation_data])
            if ranks.rank == 0:
                _finish(config, state, hosts, unverified)
    except ToBeContinued:
        dist.barrier()  # the launcher terminates all ranks when the first one exits
        raise
    finally:
        meshes.destroy_process_group()


def _summary(config: RunConfig, ranks: Ranks) -> str:
    """The first line of a run: ranks, layout, model and where it starts."""
    layout = Layout.of(config, ranks.world_size)
    sizes = {axis: getattr(layout, axis) for axis in ("tensor", "pipeline", "context", "expert", "data")}
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "data")
    found = native.complete(Path(config.run_dir))
    begin = f"newest checkpoint: step {native.step_of(found[-1])}" if found else "no checkpoint yet"
    count = "1 rank" if ranks.world_size == 1 else f"{ranks.world_size} ranks"
    return (
        f"{config.stage.name}: {config.model.family} with {count_model_parameters(config.model):,} parameters on {count} "
        f"({ranks.local_size} on {socket.gethostname()}), {axes}, ZeRO {config.parallel.zero_stage}; {config.run_dir}: {begin}"
    )


def _open_run_dir(config: RunConfig, opened: ExitStack) -> Path | None:
    """Create and lock the run directory until `opened` is closed, remove what a killed job left, and return the checkpoint to start from.

    Raises:
        UserError: the directory cannot be written, another job uses it, or see starting_checkpoint.
    """
    folder = Path(config.run_dir)
    opened.enter_context(claimed(folder, "run_dir"))
    start = starting_checkpoint(config)
    remove_leftovers(folder)
    remove_leftovers(folder / "checkpoints")
    return start


def _resume(config: RunConfig, trainer: Trainer, begin: Path | None, data: Objective) -> native.TrainState:
    """Load the checkpoint to start from; with checkpoint.skip_damaged, an older one if it is damaged.

    Raises:
        UserError: as start.resume and start.initialize.
    """
    if begin is None and config.checkpoint.initialize_from is not None:
        weights = meshes.on_rank_0(lambda: initial_checkpoint(config.checkpoint.initialize_from or ""))
        return start.initialize(config, trainer, Checkpoint(weights))
    while True:
        try:
            return start.resume(config, trainer, begin, data)
        except DamagedCheckpointError as error:
            if not config.checkpoint.skip_damaged or config.checkpoint.resume != "auto" or begin is None:
                raise
            aside = meshes.on_rank_0(partial(native.set_aside, begin))
            begin = meshes.on_rank_0(lambda: starting_checkpoint(config))
            if begin is None:
                raise
            log.warning("renamed a damaged checkpoint to %s (%s), continuing from %s", aside, error.violations[0], begin)


def open_data(config: RunConfig, share: tuple[int, int]) -> tuple[Objective, Objective | None]:
    """Open the training data, and the validation data if the validation split contains a sample.

    Args:
        config: configuration of the run.
        share: (rank, world size).

    Raises:
        UserError: token shards are missing or damaged, or contain token ids outside the embedding.
    """
    training = registry.open_training(config, share)
    check_vocabulary(config, training)
    return training, registry.open_validation(config, share)


def check_vocabulary(config: RunConfig, data: Objective) -> None:
    """Refuse data with token ids outside the embedding.

    Raises:
        UserError: the vocabulary of the data is larger than the model's.
    """
    vocab_size = data.samples.vocab_size
    if vocab_size > config.model.vocab_size:
        rule = f"is less than the vocabulary size {vocab_size} of the token shards in {config.data.tokens}"
        fix = f"set model.vocab_size={vocab_size} or more, or tokenize with a smaller tokenizer"
        raise UserError.of("model.vocab_size", config.model.vocab_size, rule, fix)


def check_device(config: RunConfig, device: torch.device) -> None:
    """Refuse settings that the device does not support.

    Raises:
        UserError: flex attention on a CPU, where it has no backward pass, or products fused with collectives.
    """
    if config.training.attention == "flex" and device.type == "cpu":
        raise UserError.of("training.attention", "flex", "requires a GPU; this rank has none", "set training.attention=auto")
    if config.parallel.async_tensor == "on" and device.type == "cpu":
        raise UserError.of("parallel.async_tensor", "on", "requires a GPU; this rank has none", "set parallel.async_tensor=auto")


def starting_checkpoint(config: RunConfig) -> Path | None:
    """Return the checkpoint to resume from, None to start from scratch.

    A run directory has one history. A named checkpoint starts it; once the run has written checkpoints of its own, the same command
    continues from the newest one.

    Raises:
        UserError: the requested checkpoint is missing, or the run would not continue from the newest checkpoint of run_dir.
    """
    resume, run_dir = config.checkpoint.resume, Path(config.run_dir)
    found = native.complete(run_dir)
    newest = found[-1] if found else None
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


def initial_checkpoint(where: str) -> Path:
    """Return the checkpoint that checkpoint.initialize_from names.

    Raises:
        UserError: there is none.
    """
    return native.find_start(where, "checkpoint.initialize_from", "set it to a run directory with checkpoints, or to one of them")


def _started_by(newest: Path, resume: str) -> bool:
    """Whether the run that wrote this checkpoint was itself started with this checkpoint.resume."""
    before = native.read_index(newest).config["checkpoint"]["resume"]
    return resume != "none" and before not in ("auto", "none") and Path(before).resolve() == Path(resume).resolve()


def _hosts() -> list[str]:
    """Gather the host names of all ranks, in rank order."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def _write_config(config: RunConfig) -> None:
    """Write the resolved configuration to run_dir/config.yaml."""
    with atomic_file(Path(config.run_dir) / "config.yaml", "w") as handle:
        handle.write(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))


def _finish(config: RunConfig, state: native.TrainState, hosts: list[str], unverified: int = 0) -> bool:
    """Write the manifest of the completed run: settings, final loss, hosts, unverified shards. Returns whether it was there already."""
    run_dir = Path(config.run_dir)
    if (run_dir / artifact.MANIFEST).is_file() and artifact.read(run_dir, key="run_dir", stage=config.stage.name).totals.get(
        "step"
    ) == state.step:
        return True
    if not (run_dir / "config.yaml").is_file():
        _write_config(config)
    settings = json.loads(json.dumps({"model": dataclasses.asdict(config.model), "training": dataclasses.asdict(config.training)}))
    totals = {**dataclasses.asdict(state), "loss": last_loss(run_dir, state.step), "world_size": len(hosts), "hosts": sorted(set(hosts))}
    totals |= {"job": os.environ.get("SLURM_JOB_ID"), "commit": commit()}
    totals |= {"unverified_shards": unverified} if config.data.verify == "lazy" else {}
    files = {"config.yaml": artifact.entry(run_dir / "config.yaml")}
    artifact.write(run_dir, artifact.Manifest(config.stage.name, settings, files, totals))
    return False


def commit() -> str | None:
    """The commit of this repository, with "-dirty" if files were changed; None without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
