"""pretrain: token shards -> checkpoints and metrics.jsonl, on any number of ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf

from pipeline import artifact
from pipeline.checkpoint import native
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.data.load import blend
from pipeline.data.load.objectives import registry
from pipeline.data.load.objectives.objective import Objective
from pipeline.errors import UserError
from pipeline.files import atomic_file, make_folder, report_disk_full
from pipeline.launch.ranks import Ranks
from pipeline.parallel import mesh as meshes
from pipeline.planner.flops import flops_per_token, peak_flops
from pipeline.training import loop
from pipeline.training.metrics import Metrics
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Train to the configured number of steps, continuing where the run directory stands.

    Raises:
        UserError: before any work: no token shards, a vocabulary that does not fit, a run directory of another model.
    """
    training_data, validation_data = open_data(config, (ranks.rank, ranks.world_size))
    blend.check_epochs(config, training_data.samples)
    start = starting_point(config)
    device = meshes.init_distributed(ranks.rank, ranks.world_size, ranks.local_rank, ranks.rendezvous())
    try:
        mesh = meshes.build_mesh(Layout.of(config, ranks.world_size), device)
        trainer = Trainer(config, mesh)
        state = loop.resume(config, trainer, start, training_data)
        if state.step >= config.training.steps:
            log.info("pretrain: %s has its %d steps, nothing to do", config.run_dir, state.step)
            return
        hosts = _hosts()
        if ranks.rank == 0:
            make_folder(Path(config.run_dir))
            _write_config(config)
        length = config.training.sequence_length
        flops, peak = flops_per_token(config.model, length, training_data.decoder_length), peak_flops(device)
        all_peaks = None if peak is None else peak * ranks.world_size
        with report_disk_full(Path(config.run_dir)), Metrics(config, ranks.rank, state, length, flops, all_peaks) as metrics:
            state = loop.train(config, trainer, training_data, validation_data, state, metrics)
            metrics.flush()
            if ranks.rank == 0:
                _write_manifest(config, state, metrics.last, hosts)
    finally:
        meshes.destroy_process_group()


def open_data(config: RunConfig, share: tuple[int, int]) -> tuple[Objective, Objective | None]:
    """What the model trains on, and the same of the validation split if it holds one.

    Args:
        config: of the run.
        share: (rank, ranks) of the job.

    Raises:
        UserError: token shards are missing or damaged, or have tokens that the model has no row for.
    """
    training = registry.open_training(config, share)
    vocab_size = training.samples.vocab_size
    if vocab_size > config.model.vocab_size:
        rule = f"is smaller than the tokenizer's {vocab_size} entries in {config.data.tokens}"
        fix = f"set model.vocab_size={vocab_size} or more, or tokenize with a smaller tokenizer"
        raise UserError.of("model.vocab_size", config.model.vocab_size, rule, fix)
    return training, registry.open_validation(config, share)


def starting_point(config: RunConfig) -> Path | None:
    """The checkpoint to continue from, None to start anew.

    Raises:
        UserError: the one asked for is not there, or starting anew would mix with checkpoints that are.
    """
    resume, run_dir = config.checkpoint.resume, Path(config.run_dir)
    found = native.complete(run_dir)
    if resume == "auto":
        return found[-1] if found else None
    if resume == "none":
        if found:
            rule = f"starts anew, but {run_dir} holds {len(found)} checkpoints, the newest of step {found[-1].name[5:].lstrip('0')}"
            raise UserError.of("checkpoint.resume", resume, rule, "choose another run_dir, or checkpoint.resume=auto to continue")
        return None
    return native.find(run_dir, resume, "checkpoint.resume")


def _hosts() -> list[str]:
    """Every rank's host, in order."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def _write_config(config: RunConfig) -> None:
    """The resolved configuration, beside the results."""
    with atomic_file(Path(config.run_dir) / "config.yaml", "w") as handle:
        handle.write(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))


def _write_manifest(config: RunConfig, state: native.TrainState, last: dict[str, Any], hosts: list[str]) -> None:
    """What the finished run is: its settings, last numbers, and where it ran."""
    run_dir = Path(config.run_dir)
    settings = json.loads(json.dumps({"model": dataclasses.asdict(config.model), "training": dataclasses.asdict(config.training)}))
    totals = {**dataclasses.asdict(state), "loss": last["loss"], "world_size": len(hosts), "hosts": sorted(set(hosts))}
    files = {"config.yaml": artifact.entry(run_dir / "config.yaml")}
    artifact.write(run_dir, artifact.Manifest("pretrain", settings, files, totals))
