"""Records of checkpoints as a table and plots, and how jobs share the checkpoints."""

import csv
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

from pipeline.checkpoint import native
from pipeline.checkpoint.peft_format import WEIGHTS
from pipeline.config.stages import Evaluate
from pipeline.evaluation import checkpoint_selection, record, validation_scores
from tests.world import configured


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
    assert written.count("<svg") == 1, "the accuracy has one checkpoint, which the table shows"
    assert "step 20: 8" in written
    assert record.is_recorded(tmp_path, 100, "tasks", {"b": [2]})
    assert not record.is_recorded(tmp_path, 100, "tasks", {"b": [3]})
    assert not record.is_recorded(tmp_path, 20, "tasks", {"b": [2]})


def test_the_page_of_one_checkpoint_is_a_table(tmp_path):
    """With the name of the run, what was read, and standard errors; there is nothing to plot."""
    run = tmp_path / "llama <1>"
    scores = {"": {"validation_loss": 2.5, "validation_loss_stderr": 0.03125, "perplexity": 12.1825}, "de": {"validation_loss": 2.25}}
    record.write(run, 1500, "validation", scores, {}, {"read": {"sequences": 64, "available": 400, "targets": 4096}})
    written = (run / "evaluations/report.html").read_text()
    assert "<h1>Evaluation of llama &lt;1&gt;</h1>" in written
    assert "Step 1,500: validation loss 2.5000 ± 0.0312 nats per target, perplexity 12.1825" in written
    assert "on 64 of 400 sequences of the validation split, 4,096 targets" in written
    assert ">full validation split<" in written
    assert ">2.2500<" in written
    assert "<svg" not in written
    assert "All checkpoints" not in written
    assert record.run_name(tmp_path / "lr-sweep" / "3") == "lr-sweep/3"


def test_charts_have_axes_units_and_a_series_for_each_corpus(tmp_path):
    for step in (20, 100):
        scores = {"": {"perplexity": 8.0}, "de": {"perplexity": 9.0, "perplexity_stderr": 0.5}}
        record.write(tmp_path, step, "validation", scores, {}, {"confusion": {"labels": ["no", "yes"], "counts": [[3, 1], [0, 4]]}})
    written = (tmp_path / "evaluations/report.html").read_text()
    drawn = ElementTree.fromstring(written[written.index("<svg") : written.index("</svg>") + 6])
    texts = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert (texts[0], texts[-1]) == ("perplexity", "step")
    assert {"8.0", "9.0", "20", "100"} <= set(texts)
    assert len([each for each in drawn.iter() if each.tag.endswith("circle")]) == 4
    assert "</i>full validation split</span>" in written
    assert "</i>de</span>" in written
    assert ">9.0000 ± 0.5000<" in written
    assert ">predicted yes<" in written


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


def test_scores_of_an_adapter_are_not_those_of_the_one_that_replaces_it(tmp_path):
    checkpoint, adapter = native.folder_of(tmp_path, 1), tmp_path / "adapter"
    for folder, name in ((checkpoint, native.INDEX), (adapter, WEIGHTS)):
        folder.mkdir(parents=True)
        (folder / name).write_text("one")
    stage = Evaluate(name="evaluate", adapter=str(adapter))
    before = checkpoint_selection.settings_of(checkpoint, stage, {})
    assert checkpoint_selection.settings_of(checkpoint, stage, {}) == before
    (adapter / WEIGHTS).write_text("two")
    assert checkpoint_selection.settings_of(checkpoint, stage, {}) != before


def test_scores_with_other_settings_are_not_recorded_yet():
    stage, data = Evaluate(name="evaluate"), SimpleNamespace(samples=SimpleNamespace(corpora=[]))

    def settings(*words: str) -> dict[str, Any]:
        return validation_scores.settings_of(configured("stage=pretrain", "model=llama-tiny", *words), stage, data)

    before = settings()
    for word in ("training.document_mask=true", "training.sequence_length=16", "precision=fp32"):
        assert settings(word) != before, word
    for words, word in (
        (("training.objective=dpo",), "training.preference_loss=simpo"),
        (("training.objective=dpo", "training.preference_loss=simpo"), "training.simpo_margin=2"),
        (("model=bert-tiny", "training.objective=masked_diffusion"), "training.diffusion_eps=0.1"),
        (("model=bert-tiny",), "data.masking.rate=0.3"),
        (("model=t5-tiny",), "data.spans.mean_length=5"),
    ):
        assert settings(*words, word) != settings(*words), word
    assert settings("training.global_batch_size=4") == before, "all sequences are read"
