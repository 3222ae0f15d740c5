"""The models and layouts of tools/reshard_matrix, and what its ranks do: save known values, load them in other layouts, save again."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_64_intdigest

from pipeline.checkpoint import load_any_layout, native
from pipeline.checkpoint.async_save import AsyncSaver
from pipeline.checkpoint.fragments import Fragment, extract_fragment
from pipeline.checkpoint.handover import Commit
from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.saver import SaveRequest
from pipeline.common.ranks import Ranks
from pipeline.training import choose_saver
from pipeline.training.trainer import Trainer
from tools.jobs import build_trainer

KINDS = ("weight", "exp_avg", "exp_avg_sq")
#: No optimizer updates this weight; moments that a checkpoint does not have are read as zero.
NO_MOMENTS = "router.bias"

#: Settings of all models.
COMMON = (
    *("stage=pretrain", "precision=fp32", "model.layers=4", "model.hidden=32", "model.heads=4", "model.max_positions=16"),
    "model.vocab_size=67",  # odd: tensor ranks have pieces of different sizes
    *("training.sequence_length=16", "training.global_batch_size=24", "training.micro_batch_size=1", "training.steps=2"),
    "optimizer.warmup_steps=1",
)

#: Family -> settings of its model.
MODELS = {
    "llama": ("model=llama-tiny", *COMMON, "model.kv_heads=4", "model.ffn_hidden=48"),
    "mixtral": ("model=mixtral-tiny", *COMMON, "model.kv_heads=4", "model.ffn_hidden=24"),
    "deepseek_v3": (
        *("model=deepseek-tiny", *COMMON, "model.ffn_hidden=48", "model.expert_ffn_hidden=12", "model.q_lora_rank=12"),
        *("model.kv_lora_rank=12", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4", "model.v_head_dim=8"),
    ),
}

#: Layouts of all families, as (ranks, settings of parallel).
SHARED = (
    (1, "zero_stage=0"),
    (2, "zero_stage=1"),
    (3, "zero_stage=2"),
    (4, "zero_stage=3"),
    (2, "tensor=2 zero_stage=0"),
    (4, "tensor=4 zero_stage=1 sequence_parallel=false"),
    (2, "pipeline=2 zero_stage=0 schedule=zbv"),
    (4, "tensor=2 pipeline=2 zero_stage=0"),
    (6, "tensor=2 zero_stage=3"),
    (8, "tensor=2 pipeline=2 zero_stage=2"),
)
CONTEXT = (
    (4, "context=2 zero_stage=3"),
    (4, "context=2 tensor=2 zero_stage=1 context_kind=ulysses"),
    (8, "context=2 tensor=2 pipeline=2 zero_stage=1"),
    (4, "pipeline=4 zero_stage=1"),
)
EXPERT = (
    (2, "expert=2 zero_stage=0"),
    (4, "expert=2 zero_stage=3"),
    (4, "expert=4 zero_stage=1"),
    (4, "expert=2 tensor=2 zero_stage=1"),
    (4, "expert=2 tensor=2 zero_stage=1 expert_tensor=1"),
    (8, "expert=2 pipeline=2 zero_stage=2"),
)
#: Family -> its layouts.
LAYOUTS = {"llama": SHARED + CONTEXT, "mixtral": SHARED + EXPERT, "deepseek_v3": SHARED + EXPERT}


def name_of(layout: tuple[int, str]) -> str:
    """A short name of a layout: t2 p2 z0 x4 for tensor=2 pipeline=2 zero_stage=0 on 4 ranks."""
    ranks, settings = layout
    words = dict(word.split("=") for word in settings.split())
    letters = {"tensor": "t", "pipeline": "p", "context": "c", "expert": "e", "zero_stage": "z"}
    more = {"sequence_parallel": "-s", "context_kind": "u", "schedule": "v", "expert_tensor": "w"}
    parts = [f"{letter}{words[key]}" for key, letter in letters.items() if key in words]
    return "".join([*parts, *(text for key, text in more.items() if key in words), f"x{ranks}"])


def overrides(family: str, layout: tuple[int, str]) -> tuple[str, ...]:
    """The command line of a family in a layout."""
    return (*MODELS[family], *(f"parallel.{word}" for word in layout[1].split()))


def known_values(name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The full weight or moment of this name: random bits of finite numbers, which depend on nothing else, fp32."""
    if kind != "weight" and name.endswith(NO_MOMENTS):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(xxh3_64_intdigest(f"{kind}/{name}".encode()) % (1 << 63))
    values = torch.randn(shape, generator=generator)
    return values.abs() if kind == "exp_avg_sq" else values


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


@contextmanager
def saving(trainer: Trainer, config: Any, run_dir: Path) -> Iterator[Callable[[int], None]]:
    """Yield a function that saves the state of a trainer as the checkpoint of a step, asynchronously as a run does. Collective.

    The function returns when the state may change, which it then does. At the end of the block all checkpoints are complete.

    Raises:
        RuntimeError: a checkpoint could not be written.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(rank, size, rank, size)
    process = choose_saver.start_writer(config.checkpoint, ranks)
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    saver = choose_saver.choose(dataclasses.replace(config, run_dir=str(run_dir)), ranks, trainer, process, None)
    settings = dataclasses.asdict(config)
    failures: list[str] = []

    def save(step: int) -> None:
        commit = Commit(native.new_index(TrainState(step), settings, "", size), 1_000_000, 0, frozenset())
        saver.begin(SaveRequest(step, trainer.engine.fragments(), lambda: None, (lambda: commit) if rank == 0 else None))
        saver.before_update()
        failures.extend(outcome.reason for outcome in saver.poll() if outcome.reason)
        fill(trainer.engine.fragments(), known=False)

    try:
        assert isinstance(saver, AsyncSaver)
        yield save
        saver.wait()
        if rank == 0:
            saver.wait_for_commit()
        failures.extend(outcome.reason for outcome in saver.poll() if outcome.reason)
        if failures:
            raise RuntimeError(failures[0])
    finally:
        saver.close()


def save_known(trainer: Trainer, config: Any, run_dir: Path) -> None:
    """Save the known values in the trainer's layout as step 1. Collective."""
    with saving(trainer, config, run_dir) as save:
        fill(trainer.engine.fragments(), known=True)
        save(1)


def load_and_save(trainer: Trainer, config: Any, sources: Sequence[Path], run_dir: Path) -> None:
    """Load checkpoints of other layouts one after the other, and save them again as steps 1, 2, ... Collective."""
    with saving(trainer, config, run_dir) as save:
        for step, source in enumerate(sources, 1):
            load_any_layout.load(Checkpoint(source), trainer.engine.fragments())
            save(step)


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


def source_in(folder: Path, family: str, name: str) -> Path:
    """The checkpoint of the known values that was saved in a layout."""
    return native.folder_of(folder / family / f"from-{name}", 1)


def serve_sources(jobs: list[tuple[str, str, Any]], folder: Path) -> None:
    """Save the known values in every layout (family, name, configuration); on one rank of a world."""
    for family, name, config in jobs:
        save_known(build_trainer(config), config, source_in(folder, family, name).parents[1])


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
        run_dir = folder / family / f"in-{name}"
        load_and_save(build_trainer(config), config, [source_in(folder, family, source) for source in sources], run_dir)
        dist.barrier()
        for step, source in list(enumerate(sources, 1))[rank::size]:
            names = set(Checkpoint(source_in(folder, family, source)).names())
            found.append((family, source, name, difference(native.folder_of(run_dir, step), names)))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(run_dir)
    return found


def serve_cells(jobs: list[tuple[str, str, Any, list[str]]], folder: Path, results: Any) -> None:
    """As load_cells; the cells are put into a queue."""
    for cell in load_cells(jobs, folder):
        results.put(cell)
