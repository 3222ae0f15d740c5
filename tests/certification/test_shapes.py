"""The part "shapes" of a certificate: the division of every weight at the full size of a job."""

from __future__ import annotations

import pytest

from pipeline.certification import shapes
from tests.certification import faults
from tests.world import configured

COMMON = ("stage=pretrain", "training.micro_batch_size=1", "training.global_batch_size=2048")
LARGE = ("model=llama3.1-405b", "parallel.tensor=8", "parallel.pipeline=16")


@pytest.mark.parametrize(
    "words, ranks",
    [
        (LARGE, 16384),
        pytest.param(
            ("model=deepseek-v3", "parallel.expert=16", "parallel.pipeline=8", "parallel.schedule=zbv"), 2048, marks=pytest.mark.long
        ),
        (("model=gpt2-xl", "parallel.tensor=5"), 10),  # an uneven vocabulary
        pytest.param(("model=t5-11b", "parallel.tensor=4", "parallel.pipeline=4"), 32, marks=pytest.mark.long),
        (("model=qwen3-next-80b-a3b", "parallel.tensor=2", "parallel.expert=8"), 64),  # other heads in linear attention
        # Groups of heads in Mamba-2 layers.
        pytest.param(("model=nemotron3-nano-30b-a3b", "parallel.tensor=2", "parallel.expert=8"), 64, marks=pytest.mark.long),
    ],
)
def test_a_job_without_fault(words: tuple[str, ...], ranks: int) -> None:
    report = shapes.report(configured(*COMMON, *words), ranks)
    assert not report.failures
    assert f"at full size on {ranks:,} ranks" in report.covered[0]


@pytest.mark.parametrize(
    "fault, expected",
    [
        (faults.pieces_leave_a_gap, "blocks.0.attention.key.weight: its pieces along dim 0 leave a gap at 1,023 of 1,024"),
        (faults.partitions_are_too_short, "the partitions of"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault(fault, expected: str) -> None:
    config = configured(*COMMON, "model=llama3-8b", "parallel.tensor=4")
    with fault():
        report = shapes.report(config, 28)
    assert any(expected in failure for failure in report.failures), report.failures[:5]
