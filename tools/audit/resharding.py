"""What the ranks of tools/reshard_matrix do: save known values in a layout, and load checkpoints of other layouts and save them again."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_64_intdigest

from pipeline.checkpoint import load_any_layout, save
from pipeline.checkpoint.fragments import Fragment, extract_fragment
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config.layout import Layout
from pipeline.parallel import mesh as meshes
from pipeline.training.trainer import Trainer

KINDS = ("weight", "exp_avg", "exp_avg_sq")
#: No optimizer updates this weight; moments that a checkpoint does not have are read as zero.
NO_MOMENTS = "router.bias"


def known_values(name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The full weight or moment of this name: random bits of finite numbers, which depend on nothing else, fp32."""
    if kind != "weight" and name.endswith(NO_MOMENTS):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(xxh3_64_intdigest(f"{kind}/{name}".encode()) % (1 << 63))
    values = torch.randn(shape, generator=generator)
    return values.abs() if kind == "exp_avg_sq" else values


def build(config: Any) -> Trainer:
    """Build the trainer of this rank. Collective."""
    return Trainer(config, meshes.build_mesh(Layout.of(config, dist.get_world_size()), torch.device("cpu")))


@torch.no_grad()
def fill(fragments: list[Fragment], known: bool) -> None:
    """Set all elements to the known values, or to others that no checkpoint has."""
    for fragment in fragments:
        for kind, tensor in fragment.tensors.items():
            assert isinstance(tensor, Tensor)
            full = known_values(fragment.piece.name, kind, fragment.piece.full_shape) if known else None
            if full is None:
                tensor.fill_(-7.0)
            else:
                tensor.copy_(extract_fragment(full, fragment.piece, fragment.start, tensor.numel()))


def save_known(trainer: Trainer, config: Any, run_dir: Path) -> None:
    """Save the known values in the trainer's layout. Collective."""
    fill(trainer.engine.fragments(), known=True)
    save_now(trainer, config, run_dir)


def load_and_save(trainer: Trainer, config: Any, source: Path, run_dir: Path) -> None:
    """Load a checkpoint of another layout and save it again. Collective."""
    fill(trainer.engine.fragments(), known=False)
    load_any_layout.load(Checkpoint(source), trainer.engine.fragments())
    save_now(trainer, config, run_dir)


def save_now(trainer: Trainer, config: Any, run_dir: Path) -> Path:
    """Save the state of a trainer as step 1 of a run directory. Collective."""
    index = Index(TrainState(step=1), dataclasses.asdict(config), "")
    return save.save(run_dir, index, trainer.engine.fragments(), keep=1)


def difference(folder: Path, expected: set[str] | None) -> str:
    """The first difference between a checkpoint and the known values; empty without one.

    Args:
        folder: the checkpoint.
        expected: the names that it must have; None for any.
    """
    checkpoint = Checkpoint(folder)
    if expected is not None and set(checkpoint.names()) != expected:
        return f"names differ: {sorted(set(checkpoint.names()) ^ expected)[:3]}"
    for name in checkpoint.names():
        for kind in KINDS:
            found, known = checkpoint.tensor(name, kind), known_values(name, kind, checkpoint.shape(name))
            if not torch.equal(found, known):
                return f"{kind} of {name}: {int((found != known).sum())} of {known.numel()} elements differ"
    return ""


def run_dir_of(folder: Path, family: str, saved: str, loaded: str = "") -> Path:
    """The run directory of a source, or of a cell."""
    return folder / family / (f"{saved}--{loaded}" if loaded else saved)


def checkpoint_in(run_dir: Path) -> Path:
    """Its checkpoint."""
    return run_dir / "checkpoints" / "step-00000001"


def serve_sources(jobs: list[tuple[str, str, Any]], folder: Path) -> None:
    """Save the known values in every layout (family, name, configuration); on one rank of a world."""
    for family, name, config in jobs:
        save_known(build(config), config, run_dir_of(folder, family, name))


def load_cells(jobs: list[tuple[str, str, Any, list[str]]], folder: Path) -> list[tuple[str, str, str, str]]:
    """Load the checkpoints of all sources in every layout; on one rank of a world.

    Args:
        jobs: (family, name of the layout, its configuration, names of the sources).
        folder: has the sources.

    Returns:
        This rank's share of the cells: (family, source, layout, difference from the known values, empty without one).
    """
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for family, name, config, sources in jobs:
        trainer = build(config)
        for source in sources:
            begin = checkpoint_in(run_dir_of(folder, family, source))
            load_and_save(trainer, config, begin, run_dir_of(folder, family, source, name))
        dist.barrier()
        for source in sources[rank::size]:
            cell = run_dir_of(folder, family, source, name)
            names = set(Checkpoint(checkpoint_in(run_dir_of(folder, family, source))).names())
            found.append((family, source, name, difference(checkpoint_in(cell), names)))
            shutil.rmtree(cell)
        dist.barrier()
    return found


def serve_cells(jobs: list[tuple[str, str, Any, list[str]]], folder: Path, results: Any) -> None:
    """As load_cells; the cells are put into a queue."""
    for cell in load_cells(jobs, folder):
        results.put(cell)
