"""Stages that read the newest checkpoint of a run that trains on, and removes it meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint import native
from pipeline.checkpoint.range_reader import RangeReader
from pipeline.common.errors import UserError
from tests.training.one_rank import run


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run("pretrain", folder, f"data.tokens={tokens}", "training.steps=3")
    return folder


@pytest.fixture
def training(trained, tmp_path, monkeypatch) -> Path:
    """A run whose newest checkpoint is that of step 2, until tensors are read: then it has the one of step 3 alone."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    third = native.folder_of(run_dir, 3)
    third.rename(tmp_path / "third")
    original = RangeReader.read

    def read(*arguments):
        monkeypatch.setattr(RangeReader, "read", original)
        (tmp_path / "third").rename(third)
        shutil.rmtree(native.folder_of(run_dir, 2))
        return original(*arguments)

    monkeypatch.setattr(RangeReader, "read", read)
    return run_dir


def test_evaluate_reads_the_newest_one(tokens, training):
    run("evaluate", training, f"data.tokens={tokens}")
    assert json.loads((training / "evaluation.json").read_text())["step"] == 3


def test_convert_reads_the_newest_one(tokenizer, training):
    run("convert", training, f"tokenizer.path={tokenizer}")
    assert json.loads((training / "hf" / "manifest.json").read_text())["totals"]["step"] == 3


def test_a_named_step_is_not_replaced(tokens, training):
    with pytest.raises(UserError, match=r"step-00000002: does not exist; the job of a run removes .*\n.*tools/checkpoint keep"):
        run("evaluate", training, f"data.tokens={tokens}", f"stage.checkpoint={native.folder_of(training, 2)}")
