"""The bounds of fitted constants, and the comparison of layouts."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.planner import fit
from pipeline.planner.published import read
from pipeline.planner.score import Score, regrets
from pipeline.planner.tables import predict
from tests.planner.test_tables import RUN

SMALL = {**RUN, "layers": "8", "pp": "1", "interleave": "1", "dp": "", "tokens_per_s_per_gpu": ""}


@pytest.fixture(scope="module")
def job():
    """Two sources whose runs take as long as planned on a GPU whose products sustain 0.9 times as much."""
    shapes = [("one", {"tp": "1", "gpus": "8"}), ("one", {"tp": "2", "gpus": "8"}), ("two", {"tp": "4"}), ("two", {"tp": "8"})]
    rows, traces = [], {}
    slower = {"h100": {"product_share": 0.9 * fit.constants()[10].start}}
    for source, cells in shapes:
        row = {**SMALL, **cells, "source": source}
        rows.append({**row, "step_time_s": str(predict(read(row, changed=slower), traces).step_time)})
    made = fit.Fit(rows)
    made._traces = traces
    return made


def test_shares_stay_below_one(job):
    at = torch.full((len(job.samples),), 3.0, dtype=torch.float64)  # much slower than measured
    x = job.solve(job.start, at, job.jacobian(job.start, at))
    most = torch.tensor([math.log(constant.most) for constant in job.constants], dtype=torch.float64)
    assert (x <= most + 1e-12).all()


def test_the_layout_that_is_predicted_fastest_is_compared_with_the_best():
    def row(predicted: float, measured: float, group: str) -> Score:
        return Score("s", "", predicted / measured - 1, None, predicted, measured, (group,))

    rows = [row(1.0, 2.2, "a"), row(2.0, 2.0, "a"), row(3.0, 4.0, "a"), row(1.0, 9.0, "b"), row(2.0, 1.0, "b")]
    assert regrets(rows) == [pytest.approx(0.1)]  # group b has two layouts only
