"""A checkpoint that is written beside the next step holds the state before that step, on four ranks in several layouts."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training import layouts, test_lora
from tests.world import share_of, tiny, trainer

MODELS = {
    "gpt": (*layouts.MODELS["gpt"].overrides, "precision=fp16", "precision.initial_loss_scale=1024", "precision.loss_scale_window=2"),
    "deepseek": layouts.MODELS["deepseek"].overrides,
    "nf4": (*layouts.MODELS["llama"].overrides, *test_lora.LORA, *test_lora.NF4),
}


def _save_beside_training(folder: str, model: str, layout: tuple[str, ...]) -> tuple[list[float], list[float], list[str]]:
    """Save after three steps, train two more beside it; continue from the checkpoint. Both losses, and what changed before the update."""
    from pipeline.checkpoint import catalog
    from pipeline.checkpoint.async_save import AsyncSaver, Node
    from pipeline.checkpoint.fragments import plan
    from pipeline.checkpoint.handover import Commit, LastUpdate
    from pipeline.checkpoint.native import TrainState, new_index
    from pipeline.checkpoint.reader import Checkpoint
    from pipeline.checkpoint.saver import SaveRequest
    from pipeline.checkpoint.writer_process import WriterProcess
    from pipeline.training import resume

    rank, size = dist.get_rank(), dist.get_world_size()
    process = WriterProcess(f"test-{os.getpid()}") if rank == 0 else None
    names: list[Any] = ["" if process is None else process.name]
    if process is not None:
        process.start()
        Path(folder, "checkpoints").mkdir()
    dist.broadcast_object_list(names)
    config, mine = trainer(*tiny(*MODELS[model], *layout))

    def train(steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens, batch = layouts.packed(config, step) if model == "gpt" else layouts.text(config, step)
            loss, result = mine.train(*share_of(mine, tokens, batch), step=step)
            losses += [float(loss), float(result.gradient_norm)]
        return losses

    train(range(3))
    fragments = mine.engine.fragments()
    shares = plan([fragment.held() for fragment in fragments])
    where, device = Node(names[0], tuple(range(size)), 0, 1), mine.mesh.device
    saver = AsyncSaver(Path(folder), rank, where, process, shares, "rank", device, "t", None, 60, 60)
    before = [{kind: tensor.detach().clone() for kind, tensor in fragment.tensors.items()} for fragment in fragments]
    changed = []

    def before_update() -> None:
        for fragment, copies in zip(fragments, before, strict=True):
            changed.extend(
                f"{kind} of {fragment.piece.name}" for kind in copies if not torch.equal(fragment.tensors[kind].detach(), copies[kind])
            )
        before.clear()
        fragments.clear()
        saver.before_update()

    mine.before_update = before_update
    updates, factor, finite_steps = mine.engine.counters().tolist()
    assert (updates, factor, finite_steps) == (mine.engine.updates(), *mine.engine.loss_scale.state())
    state = TrainState(3, 3 * config.training.global_batch_size, int(updates), factor, int(finite_steps))
    index = new_index(state, dataclasses.asdict(config), "", size)
    update = LastUpdate(config.optimizer.lr, int(updates), config.optimizer, config.training.steps)
    saver.begin(SaveRequest(3, mine.engine.fragments(), lambda: update, None if rank else lambda: Commit(index, 9, 0, frozenset())))
    straight = train(range(3, 5))
    saver.wait()
    saver.wait_for_commit()
    outcomes = saver.poll()
    assert not any(outcome.reason for outcome in outcomes), outcomes
    saver.close()
    dist.barrier()
    config, mine = trainer(*tiny(*MODELS[model], *layout, "training.seed=99"))
    resume.load(mine, Checkpoint(catalog.folder_of(Path(folder), 3)))
    return straight, train(range(3, 5)), changed


@pytest.mark.parametrize(
    "model, layout",
    [
        pytest.param("gpt", ("parallel.zero_stage=3", "parallel.tensor=2"), marks=pytest.mark.long),
        pytest.param("deepseek", ("parallel.zero_stage=1", "parallel.expert=2", "parallel.tensor=2"), marks=pytest.mark.long),
        ("deepseek", ("parallel.zero_stage=0", "parallel.expert=2", "parallel.pipeline=2")),
        pytest.param("nf4", ("parallel.zero_stage=0", "parallel.tensor=2"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_checkpoint_written_beside_training_continues_bit_for_bit(world, tmp_path, model, layout):
    """With the loss scale of fp16, weights that ZeRO 3 gathers, biases of routers, adapters and weights in 4 bits."""
    for straight, continued, changed in world.run(_save_beside_training, tmp_path, model, layout):
        assert changed == [], "nothing that is saved changes before the update"
        assert straight == continued
