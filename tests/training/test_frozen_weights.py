"""Frozen weights under ZeRO 3: on two ranks, each holds half of their matrices, and all numbers are those of ZeRO 1."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.layouts import MODELS
from tests.world import mean_loss, share_of, tiny, trainer, unsharded

RANKS = 2
LORA = ("stage=finetune", "lora.rank=3", "lora.dropout=0.1")
#: One micro-batch: ZeRO 3 sums gradients over the ranks before it adds those of micro-batches.
LLAMA = tiny(*MODELS["llama"].overrides, "precision=bf16", "training.micro_batch_size=4")
#: Name -> settings of a model, and of what is frozen.
CASES = {
    "lora": (*LLAMA, *LORA),
    # The head is frozen, too; recomputation gathers the weights once for both passes of a block.
    "recomputed": (*LLAMA, *LORA, "training.activation_checkpointing=full"),
    # Blocks without a backward pass below trained ones, frozen matrices beside trained ones, joint matrices of attention.
    "frozen": (*LLAMA, "training.frozen=[embed.*,blocks.0.*,blocks.2.attention.*.weight,blocks.3.mlp.up.*]"),
    "tied": (*LLAMA, "model.tie_embeddings=true", *LORA),
    "experts": tiny(*MODELS["mixtral"].overrides, *LORA, "parallel.expert=2", "training.micro_batch_size=4"),
    "nf4": (*LLAMA, *LORA, "lora.quantize=nf4"),
    "stages": (*LLAMA, *LORA, "lora.dropout=0", "training.micro_batch_size=1", "parallel.pipeline=2", "parallel.schedule=zbv"),
}


def batch_of(config: Any, mine: Any, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's part of a global batch."""
    model = "mixtral" if config.model.family == "mixtral" else "llama"
    return share_of(mine, *MODELS[model].batch(config, step))


def trained(mine: Any, config: Any, steps: range) -> list[float]:
    """Losses, gradient norms and losses of an evaluation."""
    numbers = []
    for step in steps:
        tokens, batch = batch_of(config, mine, step)
        loss, result = mine.train(tokens, batch, step=step)
        numbers += [float(loss), float(result.gradient_norm), float(mean_loss(mine, tokens, batch))]
    return numbers


def held(mine: Any) -> int:
    """Bytes of the frozen weights that a rank holds between two steps; parameters that are freed have none."""
    frozen = [*mine.model.fixed, *mine.model.sharded]
    own = [flat.partition for flat in getattr(mine.engine, "_frozen", []) if flat.freed]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in (*frozen, *own)}
    return sum(storages.values()) + sum(weight.nbytes for weight in mine.model.quantized)


def run(name: str, zero: int) -> tuple[list[float], dict[str, Tensor], int, list[int]]:
    """Numbers, final weights, bytes of the frozen ones that this rank holds; and of those that are gathered when gradients arrive."""
    config, mine = trainer(*CASES[name], f"parallel.zero_stage={zero}")
    gathered: list[int] = []

    def arrived(_: Any) -> None:
        gathered.append(sum(flat.flat.untyped_storage().nbytes() for flat in getattr(mine.engine, "_frozen", []) if flat.freed))

    for parameter in mine.model.pieces:
        parameter.register_post_accumulate_grad_hook(arrived)
    numbers = trained(mine, config, range(2))
    return numbers, unsharded(mine), held(mine), gathered


#: Those of the default tier.
SHORT = ("frozen", "experts", "nf4")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in CASES])
def test_all_numbers_are_those_of_zero_1_with_half_of_the_matrices(worlds, name):
    ranks_1, ranks_3 = (worlds(RANKS).run(run, name, zero) for zero in (1, 3))
    for (numbers, weights, before, _), (ours, found, after, gathered) in zip(ranks_1, ranks_3, strict=True):
        assert ours == numbers
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[weight], value) for weight, value in weights.items())
        if name == "stages":  # a rank of its own has each: nothing to shard them over, and padding
            assert after < 1.1 * before
            continue
        if name in ("experts", "nf4"):  # all but the experts, which one rank has, or weights in 4 bits
            assert after < before
            continue
        assert before / 2 < after < 0.53 * before, "vectors and the padding are replicated"
        assert 0 < max(gathered) < 0.7 * before, "those of a few modules at a time"


def continued(name: str, folder: str) -> list[list[float]]:
    """Save after two steps, train two more; continue from the checkpoint under ZeRO 3, and under ZeRO 1."""
    from pipeline.checkpoint.native import TrainState, new_index
    from pipeline.checkpoint.reader import Checkpoint
    from pipeline.checkpoint.save import save
    from pipeline.training import resume

    config, mine = trainer(*CASES[name], "parallel.zero_stage=3")
    trained(mine, config, range(2))
    state = TrainState(2, 2 * config.training.global_batch_size, mine.engine.updates(), *mine.engine.loss_scale.state())
    index = new_index(state, dataclasses.asdict(config), "", RANKS)
    saved = save(Path(folder), index, mine.engine.fragments(), 9, lambda _: False)
    numbers = [trained(mine, config, range(2, 4))]
    for zero in (3, 1):
        config, mine = trainer(*CASES[name], f"parallel.zero_stage={zero}")
        with torch.no_grad():
            for value in (value for fragment in mine.engine.fragments() for value in fragment.tensors.values()):
                value.fill_(0.5)
        resume.load(mine, Checkpoint(saved))
        numbers.append(trained(mine, config, range(2, 4)))
        dist.barrier()
    return numbers


@pytest.mark.parametrize("name", ["lora", pytest.param("frozen", marks=pytest.mark.long)])
def test_a_checkpoint_continues_bit_for_bit_also_under_another_stage(worlds, tmp_path, name):
    (tmp_path / "checkpoints").mkdir()
    for straight, same, other in worlds(RANKS).run(continued, name, str(tmp_path)):
        assert straight == same == other
