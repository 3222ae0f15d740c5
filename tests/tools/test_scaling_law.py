"""tools/audit/scaling_law: the fit recovers the constants of planted losses, also with outliers, and the optimum is the lowest loss."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.audit.scaling_law import FLOPS, Law, Point, fit

#: Hoffmann et al. 2022, section 3.3, as of the replication by Besiroglu et al. 2024 (https://arxiv.org/abs/2404.10102).
CHINCHILLA = Law(1.82, 482.0, 0.348, 2085.4, 0.366)
SIZES = (3e6, 1e7, 3e7, 1e8)


def planted(law: Law, sizes=SIZES) -> list[Point]:
    return [Point(n, share * n, law.loss(n, share * n)) for n in sizes for share in (5, 10, 20)]


@pytest.mark.long
@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.floats(0.5, 2.5), st.floats(0.2, 0.6), st.floats(0.2, 0.6), st.floats(0.1, 1.5), st.floats(0.1, 1.5))
def test_planted_constants_are_recovered(e, alpha, beta, of_weights, of_tokens):
    law = Law(e, of_weights * 1e7**alpha, alpha, of_tokens * 1e8**beta, beta)
    found = fit(planted(law))
    assert (found.e, found.alpha, found.beta) == pytest.approx((law.e, law.alpha, law.beta), rel=2e-2)
    assert found.loss(1e9, 2e10) == pytest.approx(law.loss(1e9, 2e10), rel=1e-3)


def test_one_outlier_changes_little():
    points = planted(CHINCHILLA)
    points[4] = Point(points[4].weights, points[4].tokens, points[4].loss * 1.2)
    assert fit(points).loss(1e9, 2e10) == pytest.approx(CHINCHILLA.loss(1e9, 2e10), rel=5e-3)


def test_the_optimum_has_the_lowest_loss_of_its_flops():
    weights, tokens = CHINCHILLA.optimum(1e21)
    assert FLOPS * weights * tokens == pytest.approx(1e21)
    best = CHINCHILLA.loss(weights, tokens)
    assert all(best < CHINCHILLA.loss(weights * factor, tokens / factor) for factor in (0.9, 1.1))
    assert math.isclose(best, min(CHINCHILLA.loss(weights * 2**k, tokens / 2**k) for k in range(-3, 4)))


@pytest.mark.parametrize("points", [planted(CHINCHILLA)[:4], planted(CHINCHILLA, SIZES[:2])])
def test_too_few_points_are_refused(points):
    with pytest.raises(ValueError, match="five constants require"):
        fit(points)
