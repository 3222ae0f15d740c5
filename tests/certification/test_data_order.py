"""The part "data" of a certificate: what the loaders of all ranks read is what one process reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.certification import data_order
from tests.certification import faults
from tests.world import configured

#: Three epochs of the test corpus, or more.
JOB = (
    *("stage=certify", "model=llama-tiny", "training.global_batch_size=16", "training.micro_batch_size=2", "training.sequence_length=64"),
    *("training.steps=40", "parallel.tensor=2", "training.document_mask=true", "checkpoint.every=15"),
)


def test_a_loader_without_fault(tokens: Path) -> None:
    report = data_order.report(configured(*JOB, f"data.tokens={tokens}"), 8)
    assert not report.failures
    assert "steps 1, 2, 15, 16, 39, 40 of 40, read by 4 data ranks and by one process" in report.covered[0]
    assert not report.not_covered


@pytest.mark.parametrize(
    "fault, expected",
    [
        (faults.data_ranks_read_the_same, "step 1: the data ranks read other tokens than one process in 12 of 16 sequences, 4 of which"),
        (faults.resumed_run_repeats_samples, "step 16: a rank that resumes reads other tokens than one process in"),
        (faults.ignored_targets_are_kept, "step 16: a rank that resumes reads other targets than one process in"),
        (faults.epoch_repeats_a_sequence, "epoch 1 of corpus 0 repeats sequence"),
        (faults.targets_are_the_tokens, "targets are not the next tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_of_the_loader(tokens: Path, fault, expected: str) -> None:
    config = configured(*JOB, f"data.tokens={tokens}")
    with fault():
        report = data_order.report(config, 8)
    assert any(expected in failure for failure in report.failures), report.failures


def test_no_data() -> None:
    report = data_order.report(configured(*JOB, "data.tokens=nowhere"), 8)
    assert report.not_covered == ["no data was checked: data.tokens=nowhere is not there"]
    assert not report.covered


def test_ids_beyond_the_vocabulary(tokens: Path) -> None:
    report = data_order.report(configured(*JOB, f"data.tokens={tokens}", "model.vocab_size=280"), 8)
    assert "model.vocab_size" in report.failures[0]
