"""tools/plot: the page and the picture of runs, which columns it plots, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.report import builder


@pytest.fixture
def plot(call_tool) -> Callable[..., tuple[int, str]]:
    return partial(call_tool, "plot")


@pytest.fixture
def sweep(tmp_path) -> Path:
    """A sweep with two runs; the first has no validation."""
    for number in range(2):
        lines = [{"step": step, "loss": 5 - step, "lr": 1e-4, "grad_norm": None, "tokens": 64 * step} for step in (1, 2, 3)]
        corpora = {"de": {"validation_loss": 3.5, "bits_per_byte": None}}
        lines += [{"step": 3, "validation_loss": 3.25, "validation_loss_stderr": 0.125, "corpora": corpora}] * number
        run = tmp_path / "sweep <x>" / str(number)
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"run_dir": f"sweep <x>/{number}", "values": [f"optimizer.lr={number}"]} for number in range(2)]
    (tmp_path / "sweep <x>/table.json").write_text(json.dumps(rows))
    return tmp_path / "sweep <x>"


def test_runs_of_a_sweep_share_charts_and_have_their_values_as_names(plot, sweep):
    assert plot(sweep) == (0, f"{sweep}/plot.html\n")
    written = (sweep / "plot.html").read_text()
    titles = [chart.partition("</b>")[0] for chart in written.split("<figcaption><b>")[1:]]
    assert titles == ["loss", "validation loss", "lr"], "the gradient norm has no value, and a CPU no memory"
    colors = [dict(reversed(pair) for pair in re.findall('background:(.{7})"></i>(.*?)</span>', c)) for c in written.split("<figure>")[1:]]
    names = [f"sweep &lt;x&gt;/{number} optimizer.lr={number}" for number in range(2)]
    assert [list(each) for each in colors] == [names, names[1:], names]
    assert colors[1][names[1]] == colors[0][names[1]], "a run has the same color in all charts"
    assert "3.25 +- 0.12" in written


def test_columns_are_chosen_by_name_or_pattern(plot, sweep):
    run = sweep / "1"
    assert plot(run, "--list")[1].split("\n") == ["loss", "lr", "tokens", "validation_loss", "de validation_loss", ""]
    assert plot(run, "--metric", "*validation_loss", "tokens", "--out", sweep / "chosen.html")[0] == 0
    written = (sweep / "chosen.html").read_text()
    assert re.findall("<figcaption><b>(.*?)</b>", written) == ["validation loss", "de validation loss", "tokens"]
    assert "class=series" not in written, "a single run has no legend"
    assert "<h1>Training of 1 optimizer.lr=1</h1>" in written


def test_a_picture(plot, sweep):
    pytest.importorskip("matplotlib")
    assert plot(sweep, "--out", sweep / "picture.png")[0] == 0
    assert (sweep / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_last_values_over_a_setting(plot, tmp_path):
    """A line for each value of the other setting; the places are the values of the first one by size; one run was not validated."""
    for number, (rate, width) in enumerate(((0.01, 8), (0.002, 8), (0.01, 16), (0.002, 16))):
        run = builder.write(tmp_path / str(number), builder.steps(1, 3), lr=rate)
        with open(run / "config.yaml", "a") as config:
            config.write(f"model: {{hidden: {width}}}\n")
        with open(run / "metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps(builder.validation(3, 3.0 + number, 0.25)) + "\n" if number != 3 else "")
    assert plot(tmp_path, "--over", "optimizer.lr", "--out", tmp_path / "over.html")[0] == 0
    written = (tmp_path / "over.html").read_text()
    first = written.split("<figure>")[1]
    assert re.findall("<figcaption><b>(.*?)</b>", written) == ["validation loss", "loss", "tokens per second"]
    assert re.findall("</i>(.*?)</span>", first) == ["model.hidden=16", "model.hidden=8"]
    assert re.findall('text-anchor="middle">(.*?)</text>', first) == ["0.002", "0.01", "optimizer.lr"]
    assert re.findall("<title>(.*?)</title>", first) == [
        "model.hidden=16 optimizer.lr 0.01: 5 +- 0.25",
        "model.hidden=8 optimizer.lr 0.002: 4 +- 0.25",
        "model.hidden=8 optimizer.lr 0.01: 3 +- 0.25",
    ]
    code, printed = plot(tmp_path, "--over", "optimizer.beta1")
    said = "0 does not differ from the others in it; the runs differ in model.hidden, optimizer.lr"
    assert (code, f"--over optimizer.beta1: {said}" in printed.replace(f"{tmp_path.name}/", "")) == (2, True), printed
    shutil.copytree(tmp_path / "0", tmp_path / "again")
    assert plot(tmp_path, "--over", "optimizer.lr", "--out", tmp_path / "over.html")[0] == 0
    assert (tmp_path / "over.html").read_text().count("model.hidden=8 (") > 0, "a run with the same settings is not hidden"


def test_refusals(plot, sweep, tmp_path):
    for arguments, said in (
        ((tmp_path / "no",), "no: there is no metrics.jsonl; name the run_dir of a training run"),
        ((sweep, "--metric", "los"), "--metric los: no such column. Did you mean loss?"),
        ((sweep, "--metric", "xyz"), "--metric xyz: no such column. See --list"),
        ((sweep, "--out", "plot.pdf"), "--out=plot.pdf: must end with .html or .png"),
    ):
        code, printed = plot(*arguments)
        assert code == 2
        assert said in printed
    assert not list(tmp_path.glob("**/plot*"))
