"""Mixtures: exact shares in every stretch, numbers that count up, and nothing that a later change could reorder."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.load.blend_schedule import UNITS, BlendSchedule, Phase, units

weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-7, 1e6)), min_size=1, max_size=12).filter(any)


@given(weights)
def test_units_are_the_weights_and_sum_up(given_weights):
    found = units(given_weights)
    assert sum(found) == UNITS
    for unit, weight in zip(found, given_weights, strict=True):
        assert (unit > 0) == (weight > 0)
        assert abs(unit - weight / sum(given_weights) * UNITS) < len(found) + 1


@given(weights, st.integers(0, 10**11), st.integers(1, 3000))
def test_every_stretch_has_each_corpus_as_often_as_its_weight_says(given_weights, first, count):
    schedule = BlendSchedule([Phase(given_weights)])
    corpora, _ = schedule.locate(np.arange(first, first + count))
    shares = np.array(units(given_weights)) / UNITS
    found = np.bincount(corpora, minlength=len(shares))
    assert np.abs(found - count * shares).max() < 3
    assert np.abs(schedule.counts(first) - first * shares).max() < 2
    assert np.array_equal(schedule.counts(first) + found, schedule.counts(first + count))


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 10**6)), min_size=1, max_size=4), st.integers(2, 5), st.data())
def test_the_samples_of_a_corpus_count_up_over_all_phases(steps, corpora, data):
    rows = st.lists(st.floats(0, 1), min_size=corpora, max_size=corpora).filter(any)
    ends = np.cumsum([length for length, _ in steps]).tolist()
    schedule = BlendSchedule([*(Phase(data.draw(rows), end) for end in ends), Phase(data.draw(rows))])
    samples = np.arange(ends[-1] + 300)
    places, numbers = schedule.locate(samples)
    for corpus in range(corpora):
        assert np.array_equal(numbers[places == corpus], np.arange((places == corpus).sum()))
    shuffled = np.random.default_rng(0).permutation(samples)
    again = schedule.locate(shuffled)
    assert np.array_equal(again[0], places[shuffled])
    assert np.array_equal(again[1], numbers[shuffled])


@given(weights, st.data())
def test_a_corpus_without_weight_and_a_later_phase_move_nobody(given_weights, data):
    samples = np.arange(1000)
    corpora, numbers = BlendSchedule([Phase(given_weights)]).locate(samples)
    where = data.draw(st.integers(0, len(given_weights)))
    added = [*given_weights[:where], 0.0, *given_weights[where:]]
    later = [1.0] * len(added)
    grown, grown_numbers = BlendSchedule([Phase(added, 700), Phase(later)]).locate(samples)
    assert np.array_equal(grown[:700] - (grown[:700] > where), corpora[:700])
    assert np.array_equal(grown_numbers[:700], numbers[:700])
    assert np.array_equal(np.bincount(grown[700:], minlength=len(added)) > 0, np.ones(len(added), dtype=bool))


def test_the_order_is_the_one_that_earlier_runs_had():
    """A resumed run must go on in the order it began with: these numbers must never change."""
    corpora, numbers = BlendSchedule([Phase([0.5, 0.2, 0.3], 8), Phase([0, 1, 3])]).locate(np.arange(16))
    assert corpora.tolist() == [0, 2, 0, 1, 0, 2, 0, 1, 2, 2, 1, 2, 2, 2, 1, 2]
    assert numbers.tolist() == [0, 0, 1, 0, 2, 1, 3, 1, 2, 3, 2, 4, 5, 6, 3, 7]


@pytest.mark.parametrize("scale", [1e-3, 7.0, 1e9])
def test_only_the_proportions_of_weights_matter(scale):
    assert units([scale * weight for weight in (1, 2, 5)]) == units([1, 2, 5])
