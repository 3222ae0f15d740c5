"""tools/coordinate_check: slopes and best rates, and that a wrong parametrization fails."""

import math

import pytest

from tests.helpers import ROOT, load_tool, python

TOOL = ROOT / "tools/coordinate_check"


def test_slopes_and_the_minimum_of_a_parabola():
    tool = load_tool("coordinate_check")
    assert tool.slope([64, 128, 256], [3.0, 6.0, 12.0]) == pytest.approx(1)
    assert tool.slope([64, 128, 512], [2.0, 2.0, 2.0]) == pytest.approx(0)
    rates = [0.001, 0.002, 0.004, 0.008, 0.016]
    losses = [3 + math.log(rate / 0.005) ** 2 for rate in rates]
    assert tool.best_rate(rates, losses) == pytest.approx(0.005)
    assert tool.best_rate(rates, sorted(losses)) is None
    assert tool.best_rate(rates, [3.0, 2.0, 1.0, math.inf, math.inf]) == 0.004


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--widths", "0", "16"), "--widths 0 16: must be two or more ascending multiples of 16"),
        (("--lr", "0.001", "0.1"), "--lr 0.001 0.1: must be one rate; add --rates"),
        (("--steps", "0"), "--steps 0: must be at least 1"),
        (("--overrides", "optimizer=lion"), "optimizer.name=lion: has other updates than AdamW and Muon"),
        (("--overrides", "foo=1"), "--overrides foo=1: Could not override 'foo'"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused(call_tool, words, message):
    code, printed = call_tool("coordinate_check", *words)
    assert code == 2
    assert message in printed


@pytest.mark.long
def test_the_standard_parametrization_has_slopes_and_mup_has_fewer():
    words = ("--widths", "16", "64", "--steps", "2", "--tolerance", "0.3")
    code, printed = python(TOOL, *words, "--parametrization", "standard")
    assert code == 0, "only mup has to pass"
    assert "feed-forward" in printed
    assert "FAILED" in printed
    code, printed = python(TOOL, *words, "--parametrization", "mup")
    assert code == 0, printed
    assert "FAILED" not in printed
    code, printed = python(TOOL, *words, "--parametrization", "mup", "--tolerance", "1e-5")
    assert code == 1, printed


def test_rates_are_measured():
    words = ("--rates", "--widths", "16", "32", "--steps", "3", "--lr", "0.001", "1", "10", "--parametrization", "mup")
    code, printed = python(TOOL, *words)
    assert code == 0, printed
    (*_, best, first), (*losses, _, ratio) = [list(map(float, line.split()[1:])) for line in printed.splitlines()[-2:]]
    assert first == 1
    assert 0.001 < best < 10
    assert losses[1] < losses[0] - 0.1, "the run learns more with a usual rate than with a small one"
    assert 0.2 < ratio < 5
