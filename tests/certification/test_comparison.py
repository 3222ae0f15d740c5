"""Elements of a key's bias that have no gradient are compared by their drift, the others by their relative difference."""

from __future__ import annotations

import pytest
import torch

from pipeline.certification.comparison import DRIFT, PART, ZERO, Outcome, differences, zero_gradients

BIAS = "blocks.0.attention.key.bias"


def outcome(bias: list[float], noise: float) -> Outcome:
    """A training whose bias has a gradient in its first two elements only; Adam has moved the others by rounding errors."""
    gradient = {BIAS: torch.tensor([0.5, -0.25, noise, -noise]), "other": torch.ones(4)}
    return Outcome([1.0], [1.0], {"gradient": gradient, "moment": gradient, "weight": {BIAS: torch.tensor(bias), "other": torch.ones(4)}})


def test_elements_without_a_gradient_are_told_apart() -> None:
    reference = outcome([1.0, 2.0, 0.001, -0.002], 1e-16)
    zero = zero_gradients(reference)
    assert zero.keys() == {BIAS}
    found = differences(outcome([1.0, 2.0, 0.003, 0.002], 2e-16), reference, zero=zero, drift=0.01)
    assert found["weight"].value == found["gradient"].value == 0
    assert found[DRIFT].value == pytest.approx(0.4)
    assert found[DRIFT].where == f"{BIAS}{PART}"
    assert found[ZERO].value < 1e-15
    wrong = differences(outcome([1.0, 2.1, 0.001, -0.002], 1e-16), reference, zero=zero, drift=0.01)
    assert wrong["weight"].where == BIAS
    assert wrong["weight"].value == pytest.approx(0.1 / 5**0.5)
    assert differences(outcome([1.0, 2.0, 0.003, 0.002], 1.0), reference, zero=zero)[ZERO].value > 0.1
