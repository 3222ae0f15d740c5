"""Training on four ranks equals a plain loop in a single process, for the models and layouts of layouts.py."""

from __future__ import annotations

import functools

import pytest
import torch

from pipeline.layers.recipes import Constant
from pipeline.models.registry import family_of
from tests.training.expected import STATISTICS, Trained, train_plain
from tests.training.layouts import CASES, MODELS, STEPS, TIERS, combinations, packed
from tests.world import configured, in_layout, mean_loss, share_of, tiny, trainer, unsharded


def train(name: str, layout: str) -> Trained:
    """Train a model in a layout of the world. Rank 0 returns all weights and moments, the others the biases of their routers."""
    model = MODELS[name]
    config, mine = trainer(*tiny(*model.overrides, *in_layout(layout)))
    numbers, validated = [], []
    for step in range(STEPS):
        tokens, batch = share_of(mine, *model.batch(config, step))
        if step == STEPS - 1 and not getattr(config.model, "experts", 0):  # in training their loss has more terms
            validated.append(float(mean_loss(mine, tokens, batch)))
        loss, result = mine.train(tokens, batch, step=step)
        numbers.append((float(loss), float(result.gradient_norm), *(float(result.more[key]) for key in STATISTICS if key in result.more)))
    weights, moments, averages = unsharded(mine), unsharded(mine, "exp_avg"), unsharded(mine, "ema")
    if mine.mesh.rank == 0:
        return Trained(numbers, validated, weights, moments, averages)
    return Trained(numbers, validated, {piece.name: value for value, piece in mine.model.fixed.items()}, {}, {})


@functools.cache
def reference(name: str) -> Trained:
    """The same in a plain loop."""
    model = MODELS[name]
    config = configured(*tiny(*model.overrides))
    return train_plain(config, [model.batch(config, step) for step in range(STEPS)])


@functools.cache
def offsets(name: str) -> set[str]:
    """Weights of a model that are stored as an offset from one."""
    config = configured(*tiny(*MODELS[name].overrides)).model
    initial = family_of(config).initial_std
    return {weight for weight in reference(name).weights if weight.endswith("norm.weight") and initial(config, weight) == Constant(0.0)}


def size(name: str, weight: str, value: torch.Tensor) -> torch.Tensor:
    """Norm of a weight, of an offset from one that of what it multiplies by, whose rounding is that of a step."""
    return (1 + value if weight in offsets(name) else value).norm()


@pytest.mark.parametrize("name, layout", TIERS)
def test_four_ranks_equal_a_plain_loop(world, name, layout):
    model, expected = MODELS[name], reference(name)
    ranks = world.run(train, name, layout)
    for found in ranks:
        ours, theirs = torch.tensor(found.numbers), torch.tensor(expected.numbers)
        torch.testing.assert_close(ours[:, :2], theirs[:, :2], rtol=1e-5, atol=0)
        torch.testing.assert_close(ours[:, 2:], theirs[:, 2:], rtol=1e-5, atol=1e-6)
        assert found.validated == pytest.approx(expected.validated[-1:], rel=1e-5)
        for weight, value in found.weights.items():
            if weight.endswith("router.bias"):  # on every rank
                torch.testing.assert_close(value, expected.weights[weight], rtol=0, atol=1e-7)
    assert ranks[0].weights.keys() == expected.weights.keys()
    # Softmax is invariant to the biases of keys, so their gradients are rounding errors; with sinks it is not.
    sinks = any(name.endswith("attention.sinks") for name in expected.weights)
    names = [name for name in expected.weights if sinks or not name.endswith("attention.key.bias")]
    for weight in names if "weights" in model.compared else ():
        gap = (ranks[0].weights[weight] - expected.weights[weight]).norm()
        assert gap <= 1e-5 * size(name, weight, expected.weights[weight]), f"{weight}: {gap}"  # frozen biases are zeros
    for weight in names if "moments" in model.compared else ():
        if weight in expected.moments:  # a wrongly scaled gradient changes them, but not the steps of Adam
            ours, theirs = ranks[0].moments[weight], expected.moments[weight]
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-7, weight
    assert ranks[0].averages.keys() == expected.averages.keys()
    for weight in names if "weights" in model.compared else ():
        if weight in expected.averages:
            gap = (ranks[0].averages[weight] - expected.averages[weight]).norm() / size(name, weight, expected.averages[weight])
            assert gap < 1e-5, f"average of {weight}: {gap}"


def test_the_references_exercise_what_they_should():
    """Document masks change the loss, gradients are clipped, losses of the routers count, and their biases move."""
    config, gpt = configured(*tiny(*MODELS["gpt"].overrides)), reference("gpt")
    unmasked = [(tokens, {"targets": batch["targets"]}) for tokens, batch in (packed(config, step) for step in range(3))]
    assert train_plain(config, unmasked).numbers[0][0] != pytest.approx(gpt.numbers[0][0], rel=1e-5), "the mask changes the loss"
    mixtral, deepseek = reference("mixtral"), reference("deepseek")
    assert max(norm for _, norm, *_ in mixtral.numbers) > 0.5, "clipping is active"
    assert all(aux > 0.2 for *_, aux in mixtral.numbers), "two layers, each at least 0.1"
    assert all(dropped > 0.05 for *_, dropped, _ in reference("mixtral-padded").numbers), "some experts are full"
    biases = [weight for name, weight in deepseek.weights.items() if name.endswith("router.bias")]
    assert len(biases) == 2, "of a block and of the prediction of a second token"
    assert all(0.01 - 1e-6 <= bias.abs().max() <= 0.03 + 1e-6 for bias in biases), "three steps of 0.01"


def test_every_combination_is_trained_in_the_default_tier():
    """The other layouts have no pair of axes, and nothing else that no layout of the same kind of model has."""
    default = [case.values for case in TIERS if not case.marks]
    trained = set().union(*(combinations(*case) for case in default))
    assert trained == set().union(*(combinations(*case) for case in CASES))
    assert {("ring", "tensor"), ("masked", "tensor"), ("encoder-decoder", "zero_stage=3"), ("expert", "tensor"), ("bloom",)} <= trained
    assert len(default) < len(CASES) / 2
