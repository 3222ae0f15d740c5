"""parallel.offload=optimizer: the same training, with master weights and optimizer state in host memory."""

import dataclasses

import pytest
import torch

from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config.rules import check
from pipeline.config.rules import parallel as rules
from tests.training.test_engine import _save_and_continue, make, train
from tests.world import configured, saved, unsharded

OFFLOAD = "parallel.offload=optimizer"


def _trained(folder, *overrides):
    """Numbers of five steps, of which one is skipped in fp16, the state, and the digests of a checkpoint."""
    config, trainer = make(*overrides)
    numbers = train(config, trainer, range(5))
    tensors = {kind: unsharded(trainer, kind) for kind in ("weight", "exp_avg", "exp_avg_sq", "ema")}
    state = TrainState(5, 80, trainer.engine.updates(), *trainer.engine.loss_scale.state())
    return numbers, tensors, Checkpoint(saved(folder, config, trainer, state)).index.tensors, trainer.engine.counters().tolist()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("precision=fp32", "parallel.zero_stage=1"), marks=pytest.mark.long),
        ("precision=bf16", "parallel.zero_stage=3", "parallel.tensor=2"),
        pytest.param(
            ("precision=bf16", "parallel.zero_stage=2", "parallel.zero_group=2", "training.micro_batch_size=2"), marks=pytest.mark.long
        ),
        pytest.param(
            (
                *("precision=fp16", "precision.initial_loss_scale=1e6"),
                *("parallel.zero_stage=2", "parallel.pipeline=2", "training.micro_batch_size=2"),
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=" ".join,
)
def test_training_and_checkpoints_are_the_same_bit_for_bit(world, tmp_path, layout):
    plain = world.run(_trained, tmp_path / "plain", *layout)
    offloaded = world.run(_trained, tmp_path / "offloaded", *layout, OFFLOAD)
    for (numbers, tensors, stored, counters), (same, others, as_stored, as_counted) in zip(plain, offloaded, strict=True):
        assert str(numbers) == str(same)  # a norm may be nan
        assert counters == as_counted
        assert stored == as_stored
        for kind, values in tensors.items():
            assert values
            assert all(torch.equal(value, others[kind][name]) for name, value in values.items()), kind
    if "precision=fp16" in layout:
        assert {skipped for *_, skipped in plain[0][0]} == {0.0, 1.0}, "steps must have been skipped, but not all"


@pytest.mark.parametrize("first, second", [((), (OFFLOAD,)), pytest.param((OFFLOAD,), (), marks=pytest.mark.long)], ids=str)
def test_a_checkpoint_continues_with_and_without_it(worlds, tmp_path, first, second):
    layout = ("precision=bf16", "parallel.zero_stage=3")
    for (straight, average), (loaded, same) in worlds(2).run(_save_and_continue, tmp_path, (*layout, *first), (*layout, *second)):
        assert straight == loaded
        assert all(torch.equal(average[name], same[name]) for name in average | same)


def _order():
    """What happens in a step: buckets whose gradient is fetched, updated, gathered."""
    config, trainer = make("precision=bf16", "parallel.zero_stage=2", "training.micro_batch_size=2", OFFLOAD)
    engine, events = trainer.engine, []
    update, fetch, send = engine.update, engine.update.fetch, engine.update._send
    names = [flat.bucket.name for flat in engine.weights]

    def fetched(bucket, gradient):
        events.append(("down", bucket.name))
        fetch(names.index(bucket.name), gradient)

    engine._reducer._on_reduced = fetched
    update._send = lambda index: (events.append(("up", names[index])), send(index))
    for flat in engine.weights:
        flat.refresh = lambda name=flat.bucket.name, real=flat.refresh: (events.append(("gather", name)), real())
    train(config, trainer, range(1))
    return names, [flat.bucket.name for flat in engine._gatherer.order], events


def test_a_bucket_is_gathered_before_the_next_one_is_updated(world):
    names, order, events = world.run(_order)[0]
    down = [name for kind, name in events if kind == "down"]
    assert sorted(down) == sorted(names), "each gradient is copied once a step, after its last micro-batch"
    after = events[len(down) :]
    assert after == [event for name in order for event in (("up", name), ("gather", name))]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("parallel.zero_stage=0",), "parallel.offload=optimizer: keeps the rank's partition"), (("parallel.zero_stage=1",), None)],
)
def test_what_is_refused(words, message):
    found = [str(violation) for violation in check.violations(configured("stage=pretrain", OFFLOAD, *words), 4)]
    assert any(message in text for text in found) if message else not found


def test_an_optimizer_that_the_cpu_does_not_step_is_refused():
    config = configured("stage=pretrain", OFFLOAD)
    other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="muon"))
    assert any("requires an optimizer that the CPU steps" in str(violation) for violation in rules.violations(other))
