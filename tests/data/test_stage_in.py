"""data.stage_in: one copy of the token shards a node, the same samples, and what is refused."""

from __future__ import annotations

import dataclasses
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.config.data import CorpusConfig
from pipeline.data.load import stage_in
from tests.training import one_rank
from tests.world import configured


def data(tokens: Path, folder: object):
    return configured("stage=pretrain", f"data.tokens={tokens}", f"data.stage_in={folder}").data


def test_a_run_reads_the_copy_and_ends_with_the_same_bits(tokens: Path, tmp_path: Path) -> None:
    local, shared = tmp_path / "local", tmp_path / "shared"
    local.mkdir()
    shutil.copytree(tokens, shared)
    settings = (f"data.tokens={shared}", "data.verify=all", "training.steps=3")
    one_rank.run("pretrain", tmp_path / "plain", *settings)
    one_rank.run("pretrain", tmp_path / "staged", *settings, f"data.stage_in={local}")
    one_rank.run("pretrain", tmp_path / "staged", *settings, f"data.stage_in={local}", "training.steps=4")
    (copy,) = (path for path in local.iterdir() if path.is_dir())
    assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in shared.iterdir())
    before, after = (one_rank.lines(tmp_path / name) for name in ("plain", "staged"))
    assert [line["loss"] for line in before.values()] == [line["loss"] for line in after.values()][:3]
    assert f"tokens: {shared}" in (tmp_path / "staged" / "config.yaml").read_text(), "the run can continue elsewhere"


def test_only_the_shards_of_examples_are_copied_for_fine_tuning(tokens: Path, tmp_path: Path) -> None:
    own = configured("stage=finetune", f"data.instructions.tokens={tokens}", f"data.stage_in={tmp_path}").data
    found = stage_in.staged(own, examples=True)
    assert Path(str(found.instructions.tokens)).parent == tmp_path
    assert found.tokens == own.tokens
    files = dataclasses.replace(own, instructions=dataclasses.replace(own.instructions, tokens=None))
    assert stage_in.staged(files, examples=True) == files, "files are tokenized where they are"


def test_folders_of_a_blend_are_copied_and_other_data_is_not(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL", str(tmp_path))
    own = dataclasses.replace(
        data(tokens, "$LOCAL"), tokens="no/folder", blend={"a": CorpusConfig(tokens=str(tokens)), "b": CorpusConfig()}
    )
    staged = stage_in.staged(own)
    assert staged.tokens == "no/folder"
    assert Path(str(staged.blend["a"].tokens)).parent == tmp_path
    assert staged.blend["b"] == own.blend["b"]
    assert stage_in.staged(dataclasses.replace(own, stage_in=None)).blend == own.blend


def test_refusals(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"data.stage_in=\$NOWHERE: has a variable that is not set"):
        stage_in.staged(data(tokens, "$NOWHERE"))
    with pytest.raises(UserError, match="is not a folder on"):
        stage_in.staged(data(tokens, tmp_path / "none"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "free")(1000))
    with pytest.raises(UserError, match=r"remove data\.stage_in, or name a folder with more space"):
        stage_in.staged(data(tokens, tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
