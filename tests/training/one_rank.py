"""Stages on one rank, in the process of the test."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from pipeline import stages
from pipeline.checkpoint import native
from pipeline.checkpoint.native import Index
from pipeline.common.ranks import Ranks
from pipeline.config import compose
from pipeline.config.rules import check
from pipeline.parallel import mesh as meshes
from pipeline.training import run as training_run
from pipeline.training.checkpoint_hooks import CheckpointHooks
from tests.helpers import free_port
from tests.world import composition

TINY = (
    *("model=gpt-tiny", "model.layers=1", "model.hidden=16", "model.ffn_hidden=32", "model.heads=2", "model.vocab_size=320"),
    *("training.sequence_length=32", "training.global_batch_size=4", "training.micro_batch_size=4", "training.validation_batches=1"),
    *("optimizer.warmup_steps=0", "optimizer.lr=0.01", "precision=fp32", "parallel.zero_stage=0", "tracking=disabled", "data.verify=off"),
    *("checkpoint.every=1", "checkpoint.keep=10", "checkpoint.async_save=off"),
)


def run(stage: str, run_dir: Path, *settings: object, hooks: CheckpointHooks | None = None) -> Any:
    """Check the configuration of a tiny model, run a stage in this process, and return the configuration."""
    words = [f"run_dir={run_dir}", *map(str, settings)]
    chosen = [word for word in words if "." not in word.partition("=")[0] and not word.startswith("run_dir=")]  # groups
    # Composing takes longer than training, and copy.deepcopy three times as long as this.
    composed = pickle.loads(pickle.dumps(composition((f"stage={stage}", *TINY, *chosen))))
    for key, _, value in (word.partition("=") for word in words if word not in chosen):
        OmegaConf.update(composed, key, yaml.safe_load(value), force_add=True)
    config = compose.to_run_config(composed)
    check.check(config, 1)
    ranks = Ranks(master_port=free_port())
    try:
        if stage == "pretrain":
            training_run.run(config, ranks, lambda _: hooks or CheckpointHooks(), lambda *_: None)
        else:
            stages.run(config, ranks)
    finally:
        meshes.destroy_process_group()  # the process would have ended
    return config


def lines(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The lines of metrics.jsonl with a loss, by step."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in found if "loss" in line}


def newest(run_dir: Path) -> Index:
    """The index of the newest checkpoint."""
    return native.read_index(native.find(run_dir, "latest"))
