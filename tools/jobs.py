"""Configurations and trainers of the jobs that tools run, and the process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pipeline.config import compose
from pipeline.config.layout import Layout
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.parallel import mesh as meshes

if TYPE_CHECKING:
    from pipeline.layers.stack import Stack
    from pipeline.training.trainer import Trainer


def configured(*words: str, ranks: int = 1) -> RunConfig:
    """Return the checked configuration of a command line; later words replace earlier ones.

    Raises:
        UserError: it is not valid for this number of ranks.
    """
    compose.register()
    config = compose.recompose(list(dict.fromkeys(["stage=pretrain", *words])))
    check.check(config, ranks)
    return config


def build_trainer(config: RunConfig, device: torch.device | None = None) -> Trainer:
    """Return the trainer of this rank, on the CPU if no device is given. Collective."""
    from pipeline.training.trainer import Trainer  # here and below: a benchmark measures the memory from before it

    return Trainer(config, meshes.build_mesh(Layout.of(config, dist.get_world_size()), device or torch.device("cpu")))


def initial_model(config: RunConfig) -> Stack:
    """Return the unsharded model in fp32 on the CPU, with the initial weights of a training."""
    from pipeline.certification.reference import initialize
    from pipeline.models import registry

    model = registry.build(config.model)
    initialize(model, config.model, config.training.seed)
    return model


@contextmanager
def one_rank() -> Iterator[torch.device]:
    """Be the only rank of a job, and return its device."""
    try:
        yield meshes.init_distributed(0, 1, 0, "")
    finally:
        meshes.destroy_process_group()
