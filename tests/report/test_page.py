"""stage=report: the page of a run and of several. At first look it answers:

- Is it alive?
- When does it end?
- Is the loss healthy?
- What changed at the last restart?
- How many node-hours were lost, and to what?
- Which corpus was seen how often?
- Which run is best, and by how much, with the noise of validation?
"""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.launch import sweep_manifest
from pipeline.report import answers, comparison, history, page, table
from tests.helpers import ROOT, pipeline
from tests.report.builder import events, restarted, steps, validation, write
from tests.training import one_rank

QUESTIONS = {
    "Is it alive?": "finished: 100 steps; job 7 on 2 nodes; last written",
    "When does it end?": "step 100 of 100 (100.0 %), ended ",
    "Is the loss healthy?": "3.0644 over the last 20 steps, falling (-0.0186 +- 0.0046 from the 25 steps before to the last 25); no spikes",
    "What changed at the last restart?": "because: b lost: RuntimeError: peer; without b; with c; layout data 4 -> tensor 2 x data 2",
    "How many node-hours were lost, and to what?": ("0.15 of 0.22 (waiting: 0.11; b lost: RuntimeError: peer: 0.02; start-up: 0.02)"),
    "Which corpus was seen how often?": "web 75.0 %, 0.6 epochs; books 25.0 %, 2 epochs",
    "Last validation": "3.0200 +- 0.0100 at step 100",
}


def answered(text: str) -> dict[str, str]:
    """The answers of a page."""
    found = re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", text, re.DOTALL)
    return {html.unescape(question): html.unescape(answer) for question, answer in found}


def test_the_page_of_a_run_answers_the_questions(tmp_path: Path) -> None:
    run_dir = restarted(tmp_path / "runs" / "a <b>")
    printed = pipeline("stage=report", f"run_dir='{run_dir}'")
    text = (run_dir / "report.html").read_text()
    found = answered(text)
    for question, part in QUESTIONS.items():
        assert part in found[question], question
        assert question == "Last validation" or question in printed
    for chart in ("loss", "validation loss", "grad norm", "tokens per second", "lr"):
        assert f'aria-label="{chart}"' in text
    assert text.count("<title>restart at step 40: b lost: RuntimeError: peer</title>") == 4, "charts that begin before step 40 show it"
    assert "a &lt;b&gt;" in text
    assert "a <b>" not in text


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    text = page.of_run(history.read(restarted(tmp_path)))
    assert not re.findall(r"<script|<link|<img|<iframe|\bsrc=|\bhref=|url\(|@import", text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.long
def test_a_hundred_thousand_steps_make_a_small_page(tmp_path: Path) -> None:
    lines = steps(1, 100_000)
    lines[56_788]["loss"] = 99.0
    write(tmp_path, lines, total=200_000)
    found = history.read(tmp_path)
    text = page.of_run(found)
    assert len(text.encode()) < 2_000_000
    assert found.health is not None
    assert found.health.spikes == (56_789,)
    assert ">100</text>" in text, "the spike sets the scale of the chart"


def compared(tmp_path: Path, losses: dict[str, tuple[float | None, float | None]]) -> list[history.History]:
    for number, (name, (loss, error)) in enumerate(losses.items()):
        lines = [*steps(1, 50), *([validation(50, loss, error)] if loss is not None else [])]
        write(tmp_path / name, lines, total=50, lr=(number + 1) * 1e-4, done=50)
    return [history.read(tmp_path / name) for name in losses]


@pytest.mark.parametrize(
    "losses, expected",
    [
        (
            {"x": (3.10, 0.01), "y": (3.00, 0.01)},
            "run y has the lowest validation loss (3.0000), lower by 0.1000 than that of run x, more than 2 standard errors",
        ),
        (
            {"x": (3.02, 0.01), "y": (3.00, 0.01)},
            "(3.0000); 1 of 1 others is within the noise (2 standard errors of the difference): x",
        ),
        ({"x": (3.02, None), "y": (3.00, 0.01)}, "lower by 0.0200 than that of run x; the noise of validation is not known"),
        ({"x": (3.00, 0.01), "y": (3.00, 0.01)}, "1 of 1 others is within the noise (2 standard errors of the difference): y"),
        ({"x": (3.00, None), "y": (3.00, None)}, "2 runs have the lowest validation loss (3.0000): x, y"),
        ({"x": (3.00, 0.01), **{f"y{n}": (3.01, 0.01) for n in range(9)}}, "9 of 9 others are within the noise"),
        ({"x": (3.00, 0.01), **{f"y{n}": (3.01, 0.01) for n in range(9)}}, ": y0, y1, y2, y3 and 5 more"),
        ({"x": (None, None), "y": (3.00, 0.01)}, "run y has the lowest validation loss (3.0000); no other run has one"),
        ({"x": (math.nan, 0.01), "y": (3.00, 0.01)}, "run y has the lowest validation loss (3.0000); no other run has one"),
        ({"x": (None, None), "y": (None, None)}, "x has the lowest training loss"),
    ],
)
def test_which_run_is_best(tmp_path: Path, losses: dict, expected: str) -> None:
    assert expected in comparison.verdict(page.compared(compared(tmp_path, losses)))


#: Fields of a validation that name its data: run -> losses, and what is expected of them.
SAME, OTHER = {"validation_data": "text", "tokenizer": "t1"}, {"validation_data": "text", "tokenizer": "t2"}


@pytest.mark.parametrize(
    "fields, expected",
    [
        (
            {"x": {**SAME, "bits_per_byte": 1.6}, "y": {**OTHER, "bits_per_byte": 1.5}},
            "run y has the lowest number of bits per byte of the validation split (1.5000; their tokenizers differ), lower by 0.1000",
        ),
        ({"x": {**SAME, "bits_per_byte": 1.501}, "y": {**OTHER, "bits_per_byte": 1.5}}, "1 of 1 others is within the noise"),
        ({"x": {**SAME, "bits_per_byte": 1.6}, "y": OTHER}, "no run is called the best: their tokenizers differ, and not all have bits"),
        ({"x": SAME, "y": {**SAME, "validation_data": "other"}}, "no run is called the best: their validation data differ"),
        ({"x": SAME, "y": {**SAME, "validation_samples": 1}}, "no run is called the best: a validation of one sequence says too little"),
        ({"x": {**SAME, "validation_samples": 2}, "y": {**SAME, "validation_loss_stderr": 0.0}}, "run x has the lowest validation loss"),
        ({"x": {**SAME, "validation_loss_stderr": 0.0}, "y": {**SAME, "validation_loss_stderr": 0.0}}, "run y, on the full split"),
        ({"x": SAME, "y": {}}, "run x has the lowest validation loss (3.0000), lower by 0.1000 than that of run y, more than 2"),
    ],
)
def test_runs_whose_validations_cannot_be_compared(tmp_path: Path, fields: dict[str, dict], expected: str) -> None:
    for name, loss in (("x", 3.0), ("y", 3.1)):
        write(tmp_path / name, [*steps(1, 50), validation(50, loss, 0.01) | fields[name]], total=50, done=50)
    found = page.compared([history.read(tmp_path / name) for name in "xy"])
    said = comparison.verdict(found)
    assert expected in said
    assert all(place.behind is None for place in found) == said.startswith("no run")


def test_the_page_of_several_runs(tmp_path: Path) -> None:
    compared(tmp_path / "sweep", {"0": (3.10, 0.01), "1": (3.00, 0.01), "2": (None, None)})
    events(tmp_path / "sweep/2", (0, "run_start", {"step": 0}), (5, "run_end", {"code": 1, "reason": "CUDA error"}), job=None)
    (tmp_path / "sweep/2/manifest.json").unlink()
    restarted(tmp_path / "other")
    command = ("stage=report", f"run_dir={tmp_path}/sweep", f"stage.compare=[{tmp_path}/other]", f"stage.out={tmp_path}/all.html")
    printed = pipeline(*command)
    text = (tmp_path / "all.html").read_text()
    found = answered(text)
    best = "run sweep/1 has the lowest validation loss (3.0000); 1 of 2 others is within the noise (2 standard errors of the difference)"
    best += ": other"
    assert found["Which run is best, and by how much?"].startswith(best)
    assert best in printed
    assert found["Are they alive?"] == "sweep/2: see the table"
    assert "optimizer.lr=0.0002" in text
    assert "3.0000 +- 0.0100 at step 50" in text
    assert "0.1000 +- 0.0141" in text


def test_points_of_a_sweep_that_have_not_begun_are_named(tmp_path: Path) -> None:
    manifest = sweep_manifest.read(tmp_path)
    for number in range(4):
        values = (f"optimizer.lr={number}",)
        manifest = manifest.with_point(sweep_manifest.SweepEntry(sweep_manifest.point_id(values), number, f"elsewhere/{number}", values))
    manifest.write()
    for number in (0, 2):
        write(tmp_path / str(number), steps(1, 5))
    said = "points of sweep.json that have not begun: 1, 3; tools/sweep status"
    assert said in pipeline("stage=report", f"run_dir={tmp_path}")
    assert said in (tmp_path / "report.html").read_text()
    assert said in subprocess.run([ROOT / "tools/status", tmp_path], capture_output=True, text=True, check=True).stdout
    (tmp_path / "sweep.json").write_text("{")
    assert "sweep.json" in pipeline("stage=report", f"run_dir={tmp_path}"), "a report is written, and names the damage"


def test_table_terminal_and_page_have_the_same_numbers(tmp_path: Path) -> None:
    found = history.read(restarted(tmp_path / "run"))
    (row,) = table.read_all([tmp_path / "run"])
    assert {**vars(row)} == {**vars(found.run)}
    view = "\n".join(answers.lines(found, 1000))
    text = html.unescape(page.of_run(found))
    for answer in answers.answers(found):
        assert answer.text in view
        assert answer.text in text


@pytest.mark.parametrize(
    "run_dir, settings, expected",
    [
        ("rans", (), "run_dir=.*/rans: does not exist"),
        ("empty", (), "run_dir=.*/empty: contains no training run: neither events.jsonl nor metrics.jsonl"),
        ("runs", ("stage.compare=[{}/empty]",), "stage.compare=.*/empty: contains no training run"),
        ("runs", ("stage.out=/proc/x.html",), "stage.out=.*: cannot be written|/proc/x.html: cannot be written"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, run_dir: str, settings: tuple[str, ...], expected: str) -> None:
    (tmp_path / "empty").mkdir()
    restarted(tmp_path / "runs")
    with pytest.raises(UserError, match=expected):
        one_rank.run("report", tmp_path / run_dir, *(setting.format(tmp_path) for setting in settings))


@pytest.fixture(scope="module")
def chromium() -> str:
    """The browser; tests that draw pages are skipped without it, the others read their HTML."""
    if (found := shutil.which("chromium") or shutil.which("chromium-browser")) is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    return found


def test_the_pages_fit_the_screen(chromium: str, tmp_path: Path) -> None:
    """In frames of two widths, nothing is wider than they, the first answers are visible without scrolling, and the charts are drawn."""
    one = history.read(restarted(tmp_path / "runs" / ("a-long-name-" * 8)))
    several = [one, *compared(tmp_path, {"x": (3.1, 0.01), "y": (3.0, 0.01)})]
    frames = [(text, width) for text in (page.of_run(one), page.of_runs(several)) for width in (400, 1280)]
    script = """<script>onload = () => { document.body.dataset.result = [...document.querySelectorAll("iframe")].map((frame) => {
      const page = frame.contentDocument, box = (one) => one.getBoundingClientRect()
      return [page.documentElement.scrollWidth, Math.round(box(page.querySelector("dt")).bottom),
        [...page.querySelectorAll("polyline")].filter((line) => box(line).width > 100).length].join(" ") }).join(";") }</script>"""
    drawn = [f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(text)}"></iframe>' for text, width in frames]
    (tmp_path / "frames.html").write_text(f"<!doctype html><meta charset=utf-8><body>{script}{''.join(drawn)}")
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--window-size=1400,1000")
    command = [chromium, *options, "--dump-dom", f"file://{tmp_path}/frames.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-result="([\d ;]+)"', done.stdout)
    assert found, done.stderr[-2000:]
    for (_, width), result in zip(frames, found[1].split(";"), strict=True):
        wide, first_answer, charts = map(int, result.split())
        assert wide <= width
        assert first_answer < 900
        assert charts >= 4
