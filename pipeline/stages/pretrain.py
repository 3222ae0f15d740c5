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
from pipeline.training import loop, verification
from pipeline.training.metrics import Metrics
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Train up to training.steps, starting from the newest checkpoint of the run directory.

    Raises:
        UserError: before training starts: token shards are missing, the vocabulary is too large, or run_dir contains another model.
    """
    training_data, validation_data = open_data(config, (ranks.rank, ranks.world_size))
    blend.check_epochs(config, training_data.samples)
    start = starting_checkpoint(config)
    device = meshes.init_distributed(ranks.rank, ranks.world_size, ranks.local_rank, ranks.rendezvous())
    try:
        mesh = meshes.build_mesh(Layout.of(config, ranks.world_size), device)
        trainer = Trainer(config, mesh)
        state = loop.resume(config, trainer, start, training_data)
        if state.step >= config.training.steps:
            log.info("pretrain: %s has completed %d steps, nothing to do", config.run_dir, state.step)
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
            unverified = verification.finish([training_data, validation_data], device)
            if ranks.rank == 0:
                _write_manifest(config, state, metrics.last, hosts, unverified)
    finally:
        meshes.destroy_process_group()


def open_data(config: RunConfig, share: tuple[int, int]) -> tuple[Objective, Objective | None]:
    """Open the training data, and the validation data if the validation split contains a sample.

    Args:
        config: configuration of the run.
        share: (rank, world size).

    Raises:
        UserError: token shards are missing or damaged, or contain token ids outside the embedding.
    """
    training = registry.open_training(config, share)
    vocab_size = training.samples.vocab_size
    if vocab_size > config.model.vocab_size:
        rule = f"is less than the vocabulary size {vocab_size} of the token shards in {config.data.tokens}"
        fix = f"set model.vocab_size={vocab_size} or more, or tokenize with a smaller tokenizer"
        raise UserError.of("model.vocab_size", config.model.vocab_size, rule, fix)
    return training, registry.open_validation(config, share)


def starting_checkpoint(config: RunConfig) -> Path | None:
    """Return the checkpoint to resume from, None to start from scratch.

    Raises:
        UserError: the requested checkpoint is missing, or run_dir contains checkpoints although checkpoint.resume=none.
    """
    resume, run_dir = config.checkpoint.resume, Path(config.run_dir)
    found = native.complete(run_dir)
    if resume == "auto":
        return found[-1] if found else None
    if resume == "none":
        if found:
            rule = (
                f"starts from scratch, but {run_dir} contains {len(found)} checkpoints, the newest of step {found[-1].name[5:].lstrip('0')}"
            )
            raise UserError.of("checkpoint.resume", resume, rule, "choose another run_dir, or set checkpoint.resume=auto to continue")
        return None
    return native.find(run_dir, resume, "checkpoint.resume")


def _hosts() -> list[str]:
    """Gather the host names of all ranks, in rank order."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def _write_config(config: RunConfig) -> None:
    """Write the resolved configuration to run_dir/config.yaml."""
    with atomic_file(Path(config.run_dir) / "config.yaml", "w") as handle:
        handle.write(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))


def _write_manifest(config: RunConfig, state: native.TrainState, last: dict[str, Any], hosts: list[str], unverified: int) -> None:
    """Write the manifest of the completed run: settings, final metrics, world size and hosts, and the number of unverified shards."""
    run_dir = Path(config.run_dir)
    settings = json.loads(json.dumps({"model": dataclasses.asdict(config.model), "training": dataclasses.asdict(config.training)}))
    totals = {**dataclasses.asdict(state), "loss": last["loss"], "world_size": len(hosts), "hosts": sorted(set(hosts))}
    totals |= {"unverified_shards": unverified} if config.data.verify == "lazy" else {}
    files = {"config.yaml": artifact.entry(run_dir / "config.yaml")}
    artifact.write(run_dir, artifact.Manifest("pretrain", settings, files, totals))
