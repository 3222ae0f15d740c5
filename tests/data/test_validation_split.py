"""Which samples of a validation split a validation reads."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.load.objectives import registry
from pipeline.data.load.validation_split import choose
from tests.helpers import with_manifest
from tests.world import configured


@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=9), size=st.integers(1, 400))
def test_a_sample_has_every_corpus_in_proportion_and_no_window_twice(counts, size):
    chosen, total = choose(counts, size), sum(counts)
    if size >= total:
        assert np.array_equal(chosen, np.arange(total)), "the full split, in order"
        return
    assert len(chosen) == size
    assert (np.diff(chosen) > 0).all()
    assert chosen[0] >= 0
    assert chosen[-1] < total
    found, _ = np.histogram(chosen, np.cumsum([0, *counts]) - 0.5)
    assert (np.abs(found - np.array(counts) * size / total) < 1).all()
    assert np.array_equal(chosen, choose(counts, size))


def test_every_window_is_chosen_with_the_same_probability():
    """Over many splits, that differ in their last corpus only: the sample is another one in each."""
    hits = np.zeros(10)
    for more in range(1000):
        chosen = choose([7, 3, 90 + more], 20)
        hits += np.bincount(chosen[chosen < 10], minlength=10) * (100 + more) / 20
    assert hits / 1000 == pytest.approx(np.ones(10), abs=0.4)


@pytest.mark.parametrize(("documents", "warned"), [(1, "1 document:"), (2, "2 documents:"), (30, None)])
def test_a_split_of_few_documents_is_warned_of(tokens, tmp_path, caplog, documents, warned):
    with_manifest(tokens, tmp_path / "tokens", lambda manifest: manifest["files"]["validation-00000.tar"].update(documents=documents))
    config = configured("stage=pretrain", "model=llama-tiny", f"data.tokens={tmp_path}/tokens", "training.sequence_length=32")
    with caplog.at_level(logging.WARNING, "pipeline"):
        registry.open_data(config, (0, 1))
    said = "the validation split has {}" if warned else "the validation split"
    assert (said.format(warned) in caplog.text) == bool(warned)


def test_validations_without_a_split_are_warned_of(tokens, tmp_path, caplog):
    with_manifest(tokens, tmp_path / "tokens", lambda manifest: manifest["files"].pop("validation-00000.tar"))
    config = configured("stage=pretrain", "model=llama-tiny", f"data.tokens={tmp_path}/tokens", "training.validate_every=5")
    with caplog.at_level(logging.WARNING, "pipeline"):
        registry.open_data(config, (0, 1))
    assert "training.validate_every=5 has no effect: there is no validation split" in caplog.text
