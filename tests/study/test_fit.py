"""Recovery and bounds of fitted constants, and the comparison of layouts."""

from __future__ import annotations

import math

import pytest
import torch

from tests.study.test_tables import RUN
from tools.study import baselines, fit
from tools.study.runs import read
from tools.study.score import RowScore, regrets
from tools.study.tables import predict

pytestmark = pytest.mark.long

SMALL = {**RUN, "layers": "8", "pp": "1", "interleave": "1", "dp": "", "tokens_per_s_per_gpu": ""}


#: Constants of the GPU on which the runs of the fixture take place.
KNOWN = {"product_share": 0.6, "memory_share": 0.8}


@pytest.fixture(scope="module")
def runs():
    """Rows of two sources whose runs take as long as planned on a GPU with known constants, and their traces."""
    shapes = [("one", {"tp": "1", "gpus": "8"}), ("one", {"tp": "2", "gpus": "8"}), ("two", {"tp": "4"}), ("two", {"tp": "8"})]
    rows, traces = [], {}
    for source, cells in shapes:
        row = {**SMALL, **cells, "source": source}
        rows.append({**row, "step_time_s": str(predict(read(row, changed={"h100": KNOWN}), traces).step_time)})
    return rows, traces


def made(runs, chosen=None):
    """A fit to these rows."""
    job = fit.Fit(runs[0], chosen)
    job.traces = runs[1]
    return job


def test_the_fit_finds_known_constants(runs, monkeypatch):
    monkeypatch.setattr(fit, "PULL", 1e-6)  # without preferred values
    job = made(runs, [constant for constant in fit.constants() if constant.key in KNOWN and "h100" in constant.files])
    before = job.objective(job.residuals(job.start))
    x, at, jacobian = job.run(5)
    assert job.objective(at) < 0.02 * before
    assert x.exp().tolist() == pytest.approx([KNOWN[constant.key] for constant in job.constants], rel=0.02)
    without = job.predicted_without(job.left_out(x, at, jacobian))
    assert fit.mean_error({source: [error for _, error in rows] for source, rows in without.items()}) < 0.2 * before


def test_shares_stay_below_one(runs):
    job = made(runs)
    at = torch.full((len(job.samples),), 3.0, dtype=torch.float64)  # much slower than measured
    x = job.solve(job.start, at, job.jacobian(job.start, at))
    most = torch.tensor([math.log(constant.most) for constant in job.constants], dtype=torch.float64)
    assert (x <= most + 1e-12).all()


def test_the_layout_that_is_predicted_fastest_is_compared_with_the_best():
    def row(predicted: float, measured: float, group: str) -> RowScore:
        return RowScore("s", "", predicted / measured - 1, None, predicted, measured, (group,))

    rows = [row(1.0, 2.2, "a"), row(2.0, 2.0, "a"), row(3.0, 4.0, "a"), row(1.0, 9.0, "b"), row(2.0, 1.0, "b")]
    assert regrets(rows) == [pytest.approx(0.1)]  # group b has two layouts only


def test_one_efficiency_for_each_generation_of_gpus():
    def row(source: str, gpu: str, efficiency: float) -> tuple[RowScore, float]:
        return RowScore(source, "", None, None, measured=1.0, row={"gpu": gpu}), efficiency  # seconds at the peak

    ideal = [row("a", "A100", 0.4), row("b", "A100", 0.5), row("c", "H100", 0.3)]
    everywhere, elsewhere = baselines.scaled(ideal, left_out=False), baselines.scaled(ideal, left_out=True)
    assert everywhere["a"] == [pytest.approx(0.4 / 0.45 - 1)]
    assert elsewhere["a"] == [pytest.approx(0.4 / 0.5 - 1)]
    assert (everywhere["c"], elsewhere["c"]) == ([pytest.approx(0.0)], [pytest.approx(0.3 / 0.45 - 1)])  # no other H100


def test_textbook_memory_is_that_of_korthikanti():
    row = {**SMALL, "layers": "96", "hidden": "12288", "heads": "96", "kv_heads": "96", "ffn_hidden": "49152", "vocab": "51200"}
    run = read(
        {**row, "seq_len": "2048", "gpus": "64", "tp": "8", "pp": "8", "global_batch": "64", "zero_or_fsdp": "none", "interleave": "3"}
    )
    state = 18 * (12 * 96 * 12288**2 / 64 + 51200 * 12288 / 8)
    activations = 96 * 2048 * 12288 * 34 / 8 * (1 + 7 / 24)  # table 2, with sequence parallelism and interleaving
    assert baselines.textbook_bytes(run) == pytest.approx(state + activations + 4 * 2048 * 51200 / 8, rel=1e-6)
