"""Configurations of the jobs that tools run, and the process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipeline.config import compose
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.parallel import mesh as meshes


def configured(*words: str, ranks: int = 1) -> RunConfig:
    """Return the checked configuration of a command line; later words replace earlier ones.

    Raises:
        UserError: it is not valid for this number of ranks.
    """
    compose.register()
    config = compose.recompose(list(dict.fromkeys(["stage=pretrain", *words])))
    check.check(config, ranks)
    return config


@contextmanager
def one_rank() -> Iterator[torch.device]:
    """Be the only rank of a job, and return its device."""
    try:
        yield meshes.init_distributed(0, 1, 0, "")
    finally:
        meshes.destroy_process_group()
