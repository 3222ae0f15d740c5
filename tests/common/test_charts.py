"""Charts: round ticks that enclose all values, short labels, and long series without the loss of a peak."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common.charts import LONGEST, Series, chart, labels, thinned, ticks

NUMBERS = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)


@given(st.lists(NUMBERS, min_size=1, max_size=5))
def test_ticks_enclose_the_values(values):
    found = ticks(values)
    margin = 1e-6 * (found[1] - found[0])
    assert 2 <= len(found) <= 12
    assert found[0] - margin <= min(values) <= max(values) <= found[-1] + margin
    assert all(len(label) <= 9 for label in labels(found)) or max(values) - min(values) < 1e-3 * max(map(abs, values))


@pytest.mark.parametrize(
    "values, expected",
    [
        ([3.02, 3.98], ["3.0", "3.2", "3.4", "3.6", "3.8", "4.0"]),
        ([0, 20_000], ["0k", "5k", "10k", "15k", "20k"]),
        ([0, 3e-5], ["0", "1e-05", "2e-05", "3e-05"]),
        ([7, 7], ["6.0", "6.5", "7.0", "7.5", "8.0"]),
        ([-0.04, 0.1], ["-0.05", "0.00", "0.05", "0.10"]),
        ([900, 2_100], ["500", "1,000", "1,500", "2,000", "2,500"]),
    ],
)
def test_labels_are_short(values, expected):
    assert labels(ticks(values)) == expected


def test_a_long_series_keeps_its_peaks():
    points = [(float(step), 5.0 if step == 77_777 else math.sin(step)) for step in range(200_000)]
    kept = thinned(points)
    assert len(kept) <= LONGEST
    assert (77_777.0, 5.0) in kept
    assert kept == sorted(kept)


def test_one_point_and_equal_values_are_drawn():
    drawn = chart("loss", "nats", [Series("", [(5, 2.0)]), Series("b", [(5, 2.0), (9, 2.0)], {9: 0.5})])
    assert [legend for _, legend in drawn.legend] == ["b"]
    assert len(drawn.lines[1].bars) == 1
    for line in drawn.lines:
        for x, y, _ in line.marks:
            assert drawn.left <= float(x) <= drawn.right
            assert drawn.top <= float(y) <= drawn.bottom
