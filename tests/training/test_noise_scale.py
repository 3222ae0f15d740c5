"""The gradient noise scale: beside plain gradients of the shares in layouts of four ranks, its means over steps, and refusals."""

from __future__ import annotations

import json
import math
import random
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint import native
from pipeline.config.rules import check
from pipeline.training.noise_scale import NOISE, SCALE, SIGNAL, WINDOW, NoiseScale
from tests.training.one_rank import lines, run
from tests.world import causal, configured, share, tiny, trainer

SETTINGS = tiny(
    "model=gpt-tiny", "model.layers=2", "model.ffn_hidden=64", "training.noise_scale_every=2", "optimizer.gradient_clipping=0.01"
)
#: Settings -> shares of a batch of 16 sequences on four ranks; its micro-batches have 2.
LAYOUTS = {
    ("parallel.zero_stage=3",): 8,
    ("parallel.zero_stage=1", "parallel.zero_group=2"): 4,
    ("parallel.zero_stage=1", "parallel.tensor=2"): 2,
    ("parallel.zero_stage=1", "precision=fp16"): 4,
    ("parallel.zero_stage=0", "parallel.pipeline=2"): 2,  # the embedding is also the head of the last stage
}
MORE_LAYOUTS = {
    ("parallel.zero_stage=0",): 4,
    ("parallel.zero_stage=1",): 4,
    ("parallel.zero_stage=2",): 8,
    ("parallel.zero_stage=1", "parallel.tensor=2", "parallel.sequence_parallel=false"): 2,
}


def batch(config: Any) -> torch.Tensor:
    shape = (config.training.global_batch_size, config.training.sequence_length + 1)
    return torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(5))


def plain(shares: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """Noise and signal of the first step by the formulas of the paper, from the gradients of the shares one by one."""
    config, job = trainer(*SETTINGS, "parallel.zero_stage=0")
    parameters, stage = list(job.model.pieces), job.model.stages["0"]
    size, found = config.training.global_batch_size, {}
    for count in shares:
        gradients = []
        for part in batch(config).chunk(count):
            inputs, targets = causal(part)
            gradients.append(torch.cat([g.flatten().double() for g in torch.autograd.grad(stage(inputs, **targets), parameters)]))
        small, big = size / count, size
        square_small = torch.stack([gradient.square().sum() for gradient in gradients]).mean()
        square_big = torch.stack(gradients).mean(dim=0).square().sum()
        signal = (big * square_big - small * square_small) / (big - small)
        noise = (square_small - square_big) / (1 / small - 1 / big)
        found[count] = float(noise), float(signal)
    return found


def measured(*overrides: str) -> tuple[float, float, bool]:
    """Noise and signal of a first step that measures them, and whether the next one does."""
    config, job = trainer(*SETTINGS, *overrides)
    tokens, targets = causal(*share(job, batch(config)))
    _, first = job.train(tokens, targets, (), 1)
    _, second = job.train(tokens, targets, (), 2)
    return float(first.more[NOISE]) * config.training.global_batch_size, float(first.more[SIGNAL]), NOISE in second.more


def all_measured(layouts: dict[tuple[str, ...], int]) -> list[tuple[float, float, bool]]:
    return [measured(*overrides) for overrides in layouts]


@pytest.mark.world
@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.long)], ids=["some", "others"])
def test_shares_of_every_layout_give_the_estimates_of_plain_gradients(world, layouts):
    expected = world.run(plain, tuple(sorted(set(layouts.values()))))[0]
    for found in world.run(all_measured, layouts):
        for (layout, shares), (noise, signal, again) in zip(layouts.items(), found, strict=True):
            close = {"rel": 0.05} if "precision=fp16" in layout else {"rel": 1e-4}
            assert (noise, signal) == pytest.approx(expected[shares], **close), layout
            assert not again


def line(metrics: dict[str, float]) -> str:
    return json.dumps({name: value if math.isfinite(value) else None for name, value in metrics.items()}) + "\n"


@given(count=st.integers(1, 3 * WINDOW), stop=st.integers(0, 3 * WINDOW), seed=st.integers(0, 99))
def test_the_scale_is_the_ratio_of_means_and_a_resumed_run_continues_it(tmp_path_factory, count, stop, seed):
    folder, rng = tmp_path_factory.mktemp("run"), random.Random(seed)
    values = [(rng.expovariate(1), rng.gauss(0.1, 0.3)) for _ in range(count)]
    values[count // 2] = (math.inf, math.nan)
    straight = NoiseScale(folder / "none")
    found = [straight.added({NOISE: noise, SIGNAL: signal}, 10) for noise, signal in values]
    for number, metrics in enumerate(found):
        last = [(10 * noise, signal) for noise, signal in values[: number + 1][-WINDOW:] if math.isfinite(noise)]
        noise, signal = (math.fsum(column) for column in zip(*last, strict=True)) if last else (0.0, 0.0)
        assert metrics[SCALE] == (noise / signal) if signal > 0 else math.isnan(metrics[SCALE])
    (folder / "metrics.jsonl").write_text("".join(line({"step": n, **m}) for n, m in enumerate(found[:stop])) + '{"step": 9, "loss": 1}\n')
    continued = NoiseScale(folder)
    rest = [continued.added({NOISE: noise, SIGNAL: signal}, 10) for noise, signal in values[stop:]]
    assert [line(metrics) for metrics in rest] == [line(metrics) for metrics in found[stop:]]
    assert straight.added({"loss": 1.0}, 10) == {"loss": 1.0}


def test_a_run_writes_it_and_continues_it_exactly(tokens, tmp_path):
    settings = (f"data.tokens={tokens}", "training.steps=6", "training.noise_scale_every=2", "parallel.zero_stage=2")
    settings += ("training.micro_batch_size=1",)
    run("pretrain", tmp_path / "run", *settings)
    before = lines(tmp_path / "run")
    assert [step for step, metrics in before.items() if SCALE in metrics] == [2, 4, 6]
    noise, signal = (sum(before[step][name] for step in (2, 4, 6)) for name in (NOISE, SIGNAL))
    assert before[6][SCALE] == (pytest.approx(noise / signal) if signal > 0 else None)
    for folder in native.complete(tmp_path / "run")[-3:]:
        shutil.rmtree(folder)
    (tmp_path / "run" / "checkpoints" / "catalog.json").unlink()
    run("pretrain", tmp_path / "run", *settings)
    after = lines(tmp_path / "run")
    names = ("loss", "grad_norm", NOISE, SIGNAL, SCALE)
    assert [[metrics.get(name) for name in names] for metrics in after.values()] == [
        [metrics.get(name) for name in names] for metrics in before.values()
    ]
    without = [word for word in settings if "noise" not in word]
    run("pretrain", tmp_path / "without", *without)
    assert [m["loss"] for m in lines(tmp_path / "without").values()] == [m["loss"] for m in before.values()], "nothing else changes"


@pytest.mark.parametrize(
    ("settings", "world_size", "said"),
    [
        ((), 2, None),
        ((), 1, "data ranks (parallel.zero_stage=1) with that of the batch, and there is one"),
        (("parallel.zero_stage=2",), 1, None),
        (("parallel.zero_stage=2", "training.micro_batch_size=16"), 1, "reduce training.micro_batch_size"),
        (("parallel.zero_stage=2", "training.batch_rampup=[{until_step: 2, value: 2}]"), 1, "micro-batches with that of the batch"),
        (("parallel.context=2",), 4, "is not supported with parallel.context=2 ranks"),
        (("parallel.pipeline=2", "parallel.zero_stage=2"), 4, "set parallel.zero_stage=1, or it to 0"),
        (("model=mixtral-tiny", "parallel.expert=2"), 4, "is not supported with parallel.expert=2 ranks"),
    ],
)
def test_what_is_refused(settings, world_size, said):
    found = [
        str(violation)
        for violation in check.violations(configured(*SETTINGS[:1], "training.noise_scale_every=2", *BATCH, *settings), world_size)
    ]
    assert any(said in text for text in found) if said else not found, found


BATCH = ("model=llama-tiny", "training.global_batch_size=16", "training.micro_batch_size=2")
