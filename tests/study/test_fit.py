"""Recovery and bounds of fitted constants, and the comparison of layouts."""

from __future__ import annotations

import csv
import math

import pytest
import torch

from tests.helpers import ROOT, python
from tests.study.test_tables import RUN
from tools.study import baselines, fit, leave_out
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


def test_a_publication_is_left_out_with_all_its_sources(runs):
    """Nothing of it is used: its constants are the same whatever was measured there."""
    rows = [{**row, "source": source} for row, source in zip(runs[0], ("a (one)", "a (two)", "b", "c"), strict=True)]
    other = [{**row, "step_time_s": str(3 * float(row["step_time_s"]))} if row["source"].startswith("a") else row for row in rows]
    found = []
    for table in (rows, other):
        job = made((table, runs[1]))
        found.append(job.left_out(*job.run(0))["a"])
    assert found[0].tolist() == pytest.approx(found[1].tolist(), abs=1e-6)


def unseen(source: str, *factors: float) -> list[leave_out.Unseen]:
    """Runs whose predicted time is that many times the measured one."""
    return [leave_out.Unseen(source, 8, math.log(factor)) for factor in factors]


def test_ranges_count_every_publication_the_same():
    many = [run for name in "abcdefghi" for run in unseen(name, *[1.1] * 9, 1.5)]
    assert leave_out.range_factor(many) == pytest.approx(1.1)  # nine publications: 0.8 x 10 / 9 of the runs, 0.9 are within 1.1
    assert leave_out.range_factor([*many, *unseen("a", *[1 / 1.3] * 1000)]) == pytest.approx(1.3)  # one of nine has others
    assert leave_out.range_factor(many[:20]) == pytest.approx(1.5)  # two publications promise nothing: the largest error


def test_quantiles_count_every_source_the_same():
    runs = [*unseen("a", *[1 / 2.0] * 100), *unseen("b", 1.0)]
    assert leave_out.quantiles(runs, (0.1, 0.5, 0.9)) == [pytest.approx(1.0), pytest.approx(1.0), pytest.approx(2.0)]


def test_the_range_of_a_publication_follows_from_the_others():
    runs = [*unseen("a (x)", 1.05, 1.1), *unseen("a (y)", 2.0), *unseen("b", 1.2), *unseen("c", 1 / 1.15)]
    assert leave_out.coverage(runs) == {"a": pytest.approx(2 / 3), "b": 1.0, "c": 1.0}


def test_anchors_predict_the_other_runs_of_a_machine(runs):
    """On a machine that is a fifth slower than planned, errors fall with the number of anchors, and do not reach 0."""
    shapes = [{"micro_batch": str(micro), "tp": tp} for micro in (1, 2) for tp in ("1", "2", "4", "8")]
    rows = [{**SMALL, **cells, "gpus": "8", "source": "slow"} for cells in shapes]
    rows = [{**row, "step_time_s": str(1.2 * predict(read(row), runs[1]).step_time)} for row in rows]
    job = made((rows, runs[1]))
    (found,) = leave_out.anchored(job, {"slow": job.start}).values()
    errors = [max(abs(run.relative) for run in found[number]) for number in range(4)]
    assert errors[0] == pytest.approx(1 - 1 / 1.2)
    assert errors == sorted(errors, reverse=True)
    assert 0.01 < errors[3] < 0.7 * errors[0]


def test_the_table_of_what_is_left_out(runs, tmp_path):
    rows = [{**row, "source": name} for name in ("a", "b", "c") for row in runs[0][:2]]
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    code, printed = python(ROOT / "tools/plan_score", tmp_path / "rows.csv", "--leave-out")
    assert code == 0, printed
    for word in ("covered", "range of a time", "up to 8", "anchors"):
        assert word in printed
    code, printed = python(ROOT / "tools/plan_score", tmp_path / "rows.csv", "--leave-out", "--kind", "a|b")
    assert code == 0, printed
    assert "measured / predicted at 10, 50 and 90 %" in printed
    assert "c  " not in printed
    code, printed = python(ROOT / "tools/plan_score", tmp_path / "rows.csv", "--leave-out", "--kind", "nobody")
    assert (code, "matches 0 publications" in printed) == (2, True)
    (tmp_path / "two.csv").write_text("".join((tmp_path / "rows.csv").read_text().splitlines(keepends=True)[:5]))
    code, printed = python(ROOT / "tools/plan_score", tmp_path / "two.csv", "--leave-out")
    assert code == 2
    assert "fewer than three publications" in printed
