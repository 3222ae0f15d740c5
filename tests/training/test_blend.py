"""Training with blends, phases and warm-ups: resume after an interruption, and equal metrics in every layout."""

import shutil
from pathlib import Path

import pytest
import torch

from pipeline.common.errors import UserError
from tests.helpers import pipeline
from tests.training import one_rank
from tests.world import causal, share, trainer

TINY = (
    "stage=pretrain",
    "model=llama-tiny",
    "model.layers=4",
    "model.hidden=32",
    "model.ffn_hidden=64",
    "model.vocab_size=320",
    "training.sequence_length=32",
    "training.global_batch_size=16",
    "training.micro_batch_size=2",
    "training.document_mask=true",
    "parallel.zero_stage=0",
    "precision=fp32",
    "optimizer.warmup_steps=2",
    "optimizer.min_lr_ratio=1",
    "tracking=disabled",
)
WARMUPS = (
    "training.batch_rampup=[{until_step: 2, value: 4}, {until_step: 5, value: 8}]",
    "training.sequence_warmup=[{until_step: 3, value: 8}, {until_step: 4, value: 16}]",
)
BLEND = "data.blend={web: {}, books: {}}"
#: What one_rank.run changes besides.
SAME = ("model.heads=8", "optimizer.lr=0.0003", "training.validation_batches=20")


def phases(first: int, late: str) -> str:
    """One phase for the first `first` samples, then one with the weights `late`."""
    return f"data.phases=[{{until_tokens: {32 * first}, weights: {{web: 3, books: 1}}}}, {{weights: {{{late}}}}}]"


def exact(run_dir: Path) -> list[tuple]:
    keys = ("step", "samples", "tokens", "loss", "grad_norm")
    return [tuple(line[key] for key in keys) for line in one_rank.lines(run_dir).values()]


@pytest.mark.long
def test_interrupted_within_warm_ups_and_continued_with_a_later_phase(two, tmp_path):
    common = (*TINY, *WARMUPS, f"data.tokens={two}", BLEND)
    pipeline(*common, phases(40, "books: 1"), "training.steps=7", f"run_dir={tmp_path}/straight")
    steps = one_rank.lines(tmp_path / "straight").values()
    assert [line["samples"] for line in steps] == [4, 8, 16, 24, 32, 48, 64]
    assert [line["tokens"] for line in steps] == [32 * line["samples"] for line in steps]
    assert all({"data_seconds", "data_stalls"} <= line.keys() for line in steps)
    interrupted = ("pretrain", tmp_path / "continued", *common[1:], *SAME)
    one_rank.run(*interrupted, phases(1000, "web: 1"), "training.steps=3")
    one_rank.run(*interrupted, phases(40, "books: 1"), "training.steps=7", "data.prefetch=1")
    assert exact(tmp_path / "continued") == exact(tmp_path / "straight")
    with pytest.raises(UserError, match=r"data.phases=.*was made with"):
        one_rank.run(*interrupted, phases(20, "books: 1"), "training.steps=9")


def test_a_corrupt_shard_is_refused_before_the_start_when_all_are_verified(two, tmp_path):
    shutil.copytree(two, tmp_path / "tokens")
    shard = tmp_path / "tokens" / "train-00002.tar"
    raw = bytearray(shard.read_bytes())
    raw[-3000] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(UserError, match=r"train-00002.tar: is corrupt"):
        one_rank.run("pretrain", tmp_path / "run", f"data.tokens={tmp_path}/tokens", "data.verify=all")
    assert not (tmp_path / "run").exists()


def _train(overrides):
    """Losses and gradient norms of the steps of a warm-up, on tokens that depend only on the step."""
    from pipeline.config import warmup

    ramps = ("training.batch_rampup=[{until_step:2,value:8}]", "training.sequence_warmup=[{until_step:1,value:8},{until_step:3,value:16}]")
    config, mine = trainer(*TINY, *ramps, *overrides)
    numbers = []
    for step in range(4):
        rows = torch.randint(
            config.model.vocab_size, (warmup.batch_size(config.training, step), 33), generator=torch.Generator().manual_seed(step)
        )
        length = warmup.sequence_length(config.training, step)
        windows = share(mine, rows)[0].unfold(1, length + 1, length).flatten(0, 1)
        documents = torch.zeros(len(windows), length, dtype=torch.int32)
        loss, result = mine.train(*causal(windows, documents))
        numbers += [float(loss), float(result.gradient_norm)]
    return numbers


LAYOUTS = [
    ("parallel.tensor=2", "parallel.pipeline=2", "parallel.schedule=1f1b"),
    pytest.param(("parallel.pipeline=2", "parallel.schedule=interleaved", "training.micro_batch_size=1"), marks=pytest.mark.long),
    pytest.param(
        ("parallel.pipeline=2", "parallel.schedule=zbv", "training.micro_batch_size=1", "parallel.zero_stage=1"), marks=pytest.mark.long
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_warm_ups_give_the_same_numbers_in_every_layout(world, layout):
    plain = world.run(_train, ())[0]
    for found in world.run(_train, layout):
        assert found == pytest.approx(plain, rel=1e-5)
