"""Records of checkpoints as a table and plots, and how jobs share the checkpoints."""

import csv
from xml.etree import ElementTree

from pipeline.checkpoint import native
from pipeline.common import page
from pipeline.config.stages import Evaluate
from pipeline.evaluation import checkpoint_selection, record


def test_table_and_plots_have_all_scores(tmp_path):
    record.write(tmp_path, 20, "validation", {"": {"perplexity": 8.0, "bits_per_byte": None}, "<de>": {}}, {"a": 1})
    record.write(tmp_path, 100, "validation", {"": {"perplexity": 4.0}}, {"a": 1})
    record.write(tmp_path, 100, "tasks", {"numbers": {"acc": 0.5, "acc_stderr": 0.1, "samples": 7}}, {"b": (2,)})
    with open(tmp_path / "evaluations/table.csv", encoding="utf-8") as handle:
        rows = list(csv.reader(handle))
    assert rows == [
        ["step", "perplexity", "numbers acc", "numbers acc_stderr"],
        ["20", "8.0", "", ""],
        ["100", "4.0", "0.5", "0.1"],
    ]
    written = (tmp_path / "evaluations/report.html").read_text()
    assert written.count("<svg") == 2
    assert "step 20: 8.0000" in written
    assert record.is_recorded(tmp_path, 100, "tasks", {"b": [2]})
    assert not record.is_recorded(tmp_path, 100, "tasks", {"b": [3]})
    assert not record.is_recorded(tmp_path, 20, "tasks", {"b": [2]})


def test_a_plot_is_well_formed():
    for points in ([(1, 2.0)], [(1, 2.0), (5, 2.0)], [(1, 2.0), (5, 3.0), (9, -1.0)]):
        drawn = ElementTree.fromstring(page.macros("plot.svg.jinja").plot(record.curve("a < b", points)))
        assert len([each for each in drawn.iter() if each.tag.endswith("circle")]) == len(points)


def test_tasks_of_an_array_share_the_checkpoints(tmp_path, monkeypatch):
    for step in range(1, 6):
        folder = native.folder_of(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / native.INDEX).write_text(str(step))
    stage = Evaluate(name="evaluate", checkpoint="all")
    assert len(checkpoint_selection.checkpoints(tmp_path, stage, "tasks", {})) == 5
    shares = []
    for task in ("3", "5"):
        for name, value in {"JOB_ID": "7", "TASK_ID": task, "TASK_MIN": "3", "TASK_MAX": "5", "TASK_STEP": "2", "TASK_COUNT": "2"}.items():
            monkeypatch.setenv(f"SLURM_ARRAY_{name}", value)
        shares.append([native.step_of(path) for path in checkpoint_selection.checkpoints(tmp_path, stage, "tasks", {})])
    assert shares == [[1, 3, 5], [2, 4]]
