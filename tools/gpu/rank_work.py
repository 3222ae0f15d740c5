"""What the ranks of the section `ranks` do. Imported by each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.certification.layout_training import begin, train_in_layout
from pipeline.certification.ranks_work import Work, train_all
from pipeline.config.schema import RunConfig
from pipeline.training import determinism


def file_of(folder: str, name: str) -> Path:
    """Return the file with the result of a job."""
    return Path(folder, name.replace(" ", "-").replace(",", ""))


def train_each(configs: Sequence[tuple[str, RunConfig]], folder: str) -> None:
    """Train every configuration; rank 0 writes what each computed."""
    for name, config in configs:
        _write(folder, name, train_in_layout(config, begin(config)))


def train_deterministically(work: Work) -> None:
    """Train, save and continue, with equal bits on a GPU too."""
    if torch.cuda.is_available():
        determinism.enable()
    train_all(work)


def _write(folder: str, name: str, result: object) -> None:
    """Write a result on rank 0; another rank may go on before."""
    if dist.get_rank() == 0:
        file = file_of(folder, name)
        torch.save(result, file.with_suffix(".partial"))
        file.with_suffix(".partial").rename(file)
