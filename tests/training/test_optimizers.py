"""AdEMAMix and Lion: against plain loops, in every ZeRO stage, resumed, and with settings that they do not read."""

import dataclasses

import pytest
import torch
from torch import nn

from pipeline.certification import plain_optimizers
from pipeline.certification.plain_rate import plain_rate
from pipeline.config.rules import check
from pipeline.training.optimizers import OPTIMIZERS
from tests.training.expected import train_plain
from tests.training.layouts import EPS, text
from tests.training.test_engine import _poison, _save_and_continue
from tests.training.test_offload import OFFLOAD, _trained
from tests.world import configured, share, tiny, trainer, unsharded

STEPS = 3
SMALL = ("model=gpt-tiny", "model.layers=2", "model.ffn_hidden=64", "training.micro_batch_size=4", "optimizer.gradient_clipping=0.5")
#: Few steps of the warm-up of the slow average, so that it ends within a test.
ADEMAMIX = ("optimizer=ademamix", "optimizer.beta3=0.99", "optimizer.slow_warmup_steps=2")
LION = ("optimizer=lion",)


def _gradients(shapes, updates):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(updates)]


@pytest.mark.parametrize("settings", [ADEMAMIX, ("optimizer=ademamix",), LION, ("optimizer=lion", "optimizer.beta1=0.5")], ids=" ".join)
def test_the_update_is_that_of_the_paper(settings):
    """Gradients are divided, and a step that is skipped leaves no trace: neither in the weights nor in the count of updates."""
    config = configured(*tiny(*SMALL), *settings)
    shapes = [(5, 3), (4,)]
    start = _gradients(shapes, 1)[0]
    ours, plain = ([nn.Parameter(values.clone().to(dtype)) for values in start] for dtype in (torch.float32, torch.float64))
    kind, lr = OPTIMIZERS[config.optimizer.name], torch.zeros(())
    groups = [{"params": [p], "weight_decay": config.optimizer.weight_decay if p.dim() > 1 else 0.0, "muon": False} for p in ours]
    optimizer = kind.build(groups, config.optimizer, lr, config.training.steps)
    expected = plain_optimizers.build(config, {str(index): weight for index, weight in enumerate(plain)})
    for number, gradients in enumerate(_gradients(shapes, 6)):
        lr.fill_(plain_rate(number, config.optimizer, config.training))
        skipped = number in (0, 3)
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(skipped)), torch.tensor(torch.nan if skipped else 4.0)
        for weight, gradient in zip(ours, gradients, strict=True):
            weight.grad = gradient * (torch.inf if skipped else 4.0)
        before = [weight.detach().clone() for weight in ours]
        optimizer.step()
        if skipped:
            assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True))
            continue
        for weight, gradient in zip(plain, gradients, strict=True):
            weight.grad = gradient.double()
        expected.param_groups[0]["lr"] = float(lr)
        expected.step()
        for weight, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(weight.double(), other, rtol=1e-5, atol=1e-6)
            assert set(optimizer.state[weight]) == {"step", *kind.state}
            for name in kind.state:
                torch.testing.assert_close(optimizer.state[weight][name].double(), expected.state[other][name], rtol=1e-5, atol=1e-7)
    assert all(float(optimizer.state[weight]["step"]) == 4 for weight in ours)


def _train(*overrides):
    config, mine = trainer(*tiny(*SMALL), *overrides)
    numbers = []
    for step in range(STEPS):
        tokens, batch = text(config, step)
        tokens, targets = share(mine, tokens, batch["targets"])
        loss, result = mine.train(tokens, {"targets": targets}, step=step)
        numbers.append((float(loss), float(result.gradient_norm)))
    return numbers, unsharded(mine), {kind: unsharded(mine, kind) for kind in OPTIMIZERS[config.optimizer.name].state}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_layout_equals_a_plain_loop(worlds, stage):
    """The state is one of every element, so that any partition has it."""
    settings = (*ADEMAMIX, EPS)
    config = configured(*tiny(*SMALL), *settings)
    expected = train_plain(config, [text(config, step) for step in range(STEPS)])
    more = ("parallel.tensor=2",) if stage == 0 else ()
    numbers, weights, _ = worlds(2).run(_train, f"parallel.zero_stage={stage}", *settings, *more)[0]
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(expected.numbers), rtol=1e-5, atol=0)
    for name in weights.keys() - {name for name in weights if name.endswith("key.bias")}:  # its gradient is rounding
        assert (weights[name] - expected.weights[name]).norm() < 1e-5 * expected.weights[name].norm(), name


@pytest.mark.parametrize(
    "settings",
    [("parallel.zero_stage=1", "precision=fp32", *ADEMAMIX), ("parallel.zero_stage=3", "precision=bf16", *LION)],
    ids=" ".join,
)
def test_a_loaded_state_continues_bit_for_bit(worlds, tmp_path, settings):
    for (straight, average), (loaded, same) in worlds(2).run(_save_and_continue, tmp_path, settings, settings):
        assert straight == loaded
        assert all(torch.equal(average[name], same[name]) for name in average | same)


@pytest.mark.parametrize("settings", [("parallel.zero_stage=0", *LION), ("parallel.zero_stage=2", *ADEMAMIX)], ids=" ".join)
def test_a_non_finite_gradient_skips_the_step(worlds, settings):
    for skipped, then, _, still, moved, updates in worlds(2).run(_poison, ("precision=fp32", *settings)):
        assert (skipped, then, still, moved, updates) == (1, 0, True, True, 3)


def test_the_cpu_updates_an_offloaded_state_bit_for_bit(worlds, tmp_path):
    settings = ("precision=bf16", "parallel.zero_stage=2", *ADEMAMIX)
    plain = worlds(2).run(_trained, tmp_path / "plain", *settings)
    offloaded = worlds(2).run(_trained, tmp_path / "offloaded", *settings, OFFLOAD)
    for (numbers, tensors, stored, _), (same, others, as_stored, _) in zip(plain, offloaded, strict=True):
        assert numbers == same
        assert stored == as_stored
        assert all(torch.equal(value, others[kind][name]) for kind, values in tensors.items() for name, value in values.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("optimizer.beta3=0.99",), "optimizer.beta3=0.99: has no effect with optimizer.name=adamw"),
        (("optimizer.alpha=2",), "optimizer.alpha=2.0: has no effect with optimizer.name=adamw"),
        (("optimizer=lion", "optimizer.slow_warmup_steps=5"), "optimizer.slow_warmup_steps=5: has no effect with optimizer.name=lion"),
        (("optimizer=lion", "optimizer.eps=1e-6"), "optimizer.eps=1e-06: has no effect with optimizer.name=lion"),
        (("optimizer=ademamix", "optimizer.beta3=0.99", "optimizer.alpha=2", "optimizer.eps=1e-6"), None),
        (("optimizer=lion", "parallel.offload=optimizer"), None),
    ],
)
def test_settings_of_another_optimizer_are_refused(settings, message):
    config = configured("stage=pretrain", "model=llama-tiny", *settings)
    found = [str(violation) for violation in check.violations(config, 1)]
    assert any(message in text for text in found) if message else not found, found


def test_the_defaults_of_a_group_are_those_of_the_paper():
    lion, ademamix = (configured("stage=pretrain", f"optimizer={name}").optimizer for name in ("lion", "ademamix"))
    assert (lion.name, lion.beta1, lion.beta2) == ("lion", 0.9, 0.99)
    assert (ademamix.name, ademamix.beta2, ademamix.beta3, ademamix.alpha) == ("ademamix", 0.999, 0.9999, 8.0)
    assert dataclasses.replace(ademamix, name="adamw", beta2=0.95) == configured("stage=pretrain").optimizer
