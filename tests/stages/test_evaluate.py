"""stage=evaluate by corpus."""

import csv
import json
import logging
import math
import shutil

import pytest

from pipeline.common.artifact import MANIFEST
from tests.training import one_rank


def test_scores_of_corpora_are_those_of_each_alone(tokens, tmp_path, caplog):
    """Two corpora with a validation split, and one that is too short."""
    folder = tmp_path / "tokens"
    shutil.copytree(tokens, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    for shard, entry in manifest["files"].items():
        entry["corpus"] = {"train-00001.tar": "de", "train-00002.tar": "short"}.get(shard, "en")
        if shard == "train-00001.tar":
            entry["split"] = "validation"
    (folder / MANIFEST).write_text(json.dumps(manifest))
    settings = (f"data.tokens={folder}", "training.global_batch_size=64", "training.micro_batch_size=64", "training.steps=2")
    one_rank.run("pretrain", tmp_path / "run", *settings)

    def evaluated(*more: str) -> tuple[dict, str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "pipeline"):
            one_rank.run("evaluate", tmp_path / "run", *settings, *more)
        return json.loads((tmp_path / "run/evaluation.json").read_text()), caplog.text

    whole, printed = evaluated()
    assert whole["corpora"].keys() == {"de", "en"}
    assert whole["perplexity"] == pytest.approx(math.exp(whole["validation_loss"]))
    assert "step 2, de: validation loss" in printed
    # All checkpoints: the second one is recorded already.
    again, printed = evaluated("stage.checkpoint=all")
    assert "1 of 2 checkpoints are evaluated already" in printed
    assert again["step"] == 1
    with open(tmp_path / "run/evaluations/table.csv", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert [(int(row["step"]), float(row["de validation_loss"])) for row in rows] == [
        (each["step"], pytest.approx(each["corpora"]["de"]["validation_loss"])) for each in (again, whole)
    ]
    alone, _ = evaluated("data.blend={de: {}}")
    assert "corpora" not in alone
    assert {key: alone[key] for key in whole["corpora"]["de"]} == pytest.approx(whole["corpora"]["de"], rel=1e-6)
    assert whole["corpora"]["en"]["validation_loss"] != whole["corpora"]["de"]["validation_loss"]
    both, printed = evaluated("data.blend={en: {}, short: {}}")
    assert both["corpora"]["short"] is None
    assert "short: no sequence of training.sequence_length" in printed
    sliding, _ = evaluated("data.blend={de: {}}", "stage.stride=16")
    assert sliding["validation_loss"] == pytest.approx(alone["validation_loss"], rel=0.1)
    assert sliding["validation_loss"] != alone["validation_loss"]
