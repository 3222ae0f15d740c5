"""The part "data" of a certificate: what the loaders of all ranks read is what one process reads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.certification import data_order
from pipeline.data.load.objectives import causal
from pipeline.data.load.objectives.causal import Causal
from tests.certification import faults
from tests.helpers import pipeline
from tests.world import configured

#: Three epochs of the test corpus.
JOB = (
    *("stage=certify", "model=llama-tiny", "training.global_batch_size=16", "training.micro_batch_size=2", "training.sequence_length=64"),
    *("training.steps=200", "parallel.tensor=2", "training.document_mask=true", "checkpoint.every=15"),
)


def test_a_loader_without_fault(tokens: Path) -> None:
    report = data_order.report(configured(*JOB, f"data.tokens={tokens}"), 8)
    assert not report.failures
    assert "steps 1, 2, 15, 16, 199, 200 of 200, read by 4 data ranks and by one process" in report.covered[0]
    assert not report.not_covered


@pytest.mark.parametrize(
    "fault, expected",
    [
        (faults.data_ranks_read_the_same, "step 1: the data ranks read other tokens than one process in 12 of 16 sequences, 4 of which"),
        (faults.resumed_run_repeats_samples, "step 16: a rank that resumes reads other tokens than one process in"),
        (faults.ignored_targets_are_kept, "step 16: a rank that resumes reads other targets than one process in"),
        (faults.epoch_repeats_a_sequence, "epoch 1 of corpus 0 repeats sequence"),
        (faults.epochs_have_one_order, "epoch 2 of corpus 0 has the order of epoch 1"),
        (faults.targets_are_the_tokens, "targets are not the next tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_of_the_loader(tokens: Path, fault, expected: str) -> None:
    config = configured(*JOB, f"data.tokens={tokens}")
    with fault():
        report = data_order.report(config, 8)
    assert any(expected in failure for failure in report.failures), report.failures


def test_a_blend_with_other_weights(tokens: Path) -> None:
    blend = f"+data.blend={{one:{{corpus:default,tokens:{tokens},weight:3}},two:{{corpus:default,tokens:{tokens},weight:1}}}}"
    config = configured(*JOB, blend)
    assert data_order.report(config, 8).failures == []
    with faults.blend_weights_are_swapped():
        failures = data_order.report(config, 8).failures
    assert any("samples, 800 are of corpus one, 2,400.0 by its weight" in failure for failure in failures), failures


def test_phases_of_longer_sequences(tokens: Path) -> None:
    blend = f"+data.blend={{one:{{corpus:default,tokens:{tokens}}},two:{{corpus:default,tokens:{tokens}}}}}"
    later = '{until_step: 90, sequence_length: 128, global_batch_size: 8, weights: {two: 1}, overrides: ["parallel.tensor=1"]}'
    words = (*JOB, blend, f"training.phases=[{{until_step: 70, weights: {{one: 1}}}}, {later}, {{weights: {{one: 1, two: 1}}}}]")
    report = data_order.report(configured(*words), 8)
    assert not report.failures
    assert "steps 1, 2, 15, 16, 70, 71, 90, 91, 199, 200 of 200, read by 4 data ranks, 8 data ranks and by one process" in report.covered[0]
    with faults.data_ranks_read_the_same():
        failures = data_order.report(configured(*words), 8).failures
    assert any(failure.startswith("step 71: the data ranks read other tokens") for failure in failures), failures


def test_packed_documents_that_lose_their_ends(tokens: Path) -> None:
    config = configured(*JOB, f"data.tokens={tokens}", "data.packing=best_fit", "training.sequence_length=16")
    assert data_order.report(config, 8).failures == []
    with faults.ends_of_long_documents_are_dropped():
        assert any("packing keeps" in failure for failure in data_order.report(config, 8).failures)


def test_targets_of_the_goldfish_loss(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(*JOB, f"data.tokens={tokens}", "training.goldfish_k=4")
    assert data_order.report(config, 8).failures == []
    monkeypatch.setattr(causal, "dropped", lambda text, *_: np.zeros_like(text[:, 1:], dtype=bool))
    assert any("training.goldfish_k=4 drops no target" in failure for failure in data_order.report(config, 8).failures)


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_a_validation_that_drops_targets(tokens: Path, monkeypatch: pytest.MonkeyPatch, packing: str) -> None:
    config = configured(*JOB, f"data.tokens={tokens}", "training.goldfish_k=4", f"data.packing={packing}")
    assert data_order.report(config, 8).failures == []
    monkeypatch.setattr(Causal, "_goldfish", (4, 13))
    (failure,) = data_order.report(config, 8).failures
    assert re.fullmatch(r"the validation has no loss of [1-9]\d*% of its tokens", failure)


def test_masks_of_samples(shards: Path, tmp_path: Path) -> None:
    paths = (f"tokenizer.path={tmp_path}/tokenizer", f"data.tokens={tmp_path}/tokens", "tokenizer=bert")
    pipeline("stage=train_tokenizer", *paths, f"data.shards={shards}", "tokenizer.vocab_size=520", "tokenizer.report=false")
    pipeline("stage=tokenize", *paths, f"data.shards={shards}")
    job = [word for word in JOB if not word.startswith("model=")]
    config = configured(*job, "model=bert-tiny", "model.vocab_size=520", *paths)
    assert data_order.report(config, 8).failures == []
    with faults.masks_of_all_samples_are_equal():
        failures = data_order.report(config, 8).failures
    assert "of the masked positions of a sequence are masked in the next one" in failures[0]


def test_no_data() -> None:
    report = data_order.report(configured(*JOB, "data.tokens=nowhere"), 8)
    assert report.not_covered == ["no data was checked: data.tokens=nowhere is not there"]
    assert not report.covered


def test_ids_beyond_the_vocabulary(tokens: Path) -> None:
    report = data_order.report(configured(*JOB, f"data.tokens={tokens}", "model.vocab_size=280"), 8)
    assert "model.vocab_size" in report.failures[0]
