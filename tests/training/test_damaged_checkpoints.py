"""A start beside damaged checkpoints: an older one takes over if it may, and nothing is lost otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint import catalog, native
from pipeline.common.errors import UserError
from tests.training.one_rank import lines, newest, run

SKIP = "checkpoint.skip_damaged=true"


@pytest.fixture(scope="module")
def three(tokens, tmp_path_factory) -> Path:
    """A run of three steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("three") / "run"
    run("pretrain", folder, f"data.tokens={tokens}", "training.steps=3")
    return folder


@pytest.fixture
def run_dir(three, tmp_path) -> Path:
    """A copy of that run."""
    shutil.copytree(three, tmp_path / "run")
    return tmp_path / "run"


def cut(folder: Path) -> None:
    """Cut off the end of each data file."""
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])


def empty_index(folder: Path) -> None:
    (folder / native.INDEX).write_text("{}")


def no_index(folder: Path) -> None:
    (folder / native.INDEX).unlink()


def no_parts(folder: Path) -> None:
    (folder / native.PARTS).unlink()


DAMAGES = (cut, empty_index, no_index, no_parts)


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


@pytest.mark.parametrize(
    "damage, kept",
    [
        *((cut, 1), (cut, 3), (no_index, 3)),
        *(pytest.param(damage, 3, marks=pytest.mark.long) for damage in (empty_index, no_parts)),
        *(pytest.param(damage, 1, marks=pytest.mark.long) for damage in DAMAGES[1:]),
    ],
)
def test_a_run_without_a_whole_checkpoint_is_refused_every_time(tokens, run_dir, damage, kept, caplog):
    for folder in native.complete(run_dir)[:-kept]:
        shutil.rmtree(folder)
    for folder in native.complete(run_dir):
        damage(folder)
    files, metrics = names(run_dir), (run_dir / "metrics.jsonl").read_bytes()
    for _ in range(3):
        with pytest.raises(UserError, match=r"no older checkpoint of .* is left: choose another run_dir") as raised:
            run("pretrain", run_dir, f"data.tokens={tokens}", "training.steps=5", SKIP)
        assert SKIP not in str(raised.value) + caplog.text
        assert (names(run_dir), (run_dir / "metrics.jsonl").read_bytes()) == (files, metrics)


def test_renamed_checkpoints_alone_are_refused_unless_the_run_is_to_start_again(tokens, run_dir):
    for folder in native.complete(run_dir):
        native.set_aside(folder)
    assert catalog.read(run_dir).complete == []
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    for settings in ((), (SKIP,)):
        with pytest.raises(UserError, match=r"only damaged ones: step-00000001.damaged, .*\n.*checkpoint.resume=none"):
            run("pretrain", run_dir, f"data.tokens={tokens}", "training.steps=5", *settings)
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics
    run("pretrain", run_dir, f"data.tokens={tokens}", "training.steps=1", "checkpoint.resume=none")
    assert list(lines(run_dir)) == [1]
    run("pretrain", run_dir, f"data.tokens={tokens}", "training.steps=2")
    assert newest(run_dir).train_state.step == 2


@pytest.mark.parametrize("damage", [DAMAGES[0], *(pytest.param(damage, marks=pytest.mark.long) for damage in DAMAGES[1:])])
def test_the_newest_whole_checkpoint_takes_over(tokens, run_dir, damage, caplog):
    caplog.set_level("INFO", "pipeline")
    for step in (2, 3):
        damage(native.folder_of(run_dir, step))
    with pytest.raises(UserError, match=rf"step-00000003.*\n.*{SKIP}"):
        run("pretrain", run_dir, f"data.tokens={tokens}", "training.steps=4")
    assert not native.damaged(run_dir)
    run("pretrain", run_dir, f"data.tokens={tokens}", "training.steps=4", SKIP)
    assert [path.name for path in native.damaged(run_dir)] == ["step-00000002.damaged", "step-00000003.damaged"]
    assert "step-00000001: step 1, 4 samples" in caplog.text
    assert caplog.text.count("renamed a damaged checkpoint to") == 2
    assert SKIP not in caplog.text
    assert list(lines(run_dir)) == [1, 2, 3, 4]
    assert catalog.read(run_dir).complete == [1, 2, 3, 4]


def test_a_folder_of_another_step_is_refused(tokens, run_dir):
    native.folder_of(run_dir, 2).rename(native.folder_of(run_dir, 20))
    with pytest.raises(UserError, match=r"step-00000020.*is of step 2: rename the folder to step-00000002"):
        run("pretrain", run_dir, f"data.tokens={tokens}", "training.steps=40")


def test_every_setting_that_differs_is_named(tokens, run_dir, three, caplog):
    """Also other weights to begin with, which have no effect on a run that continues."""
    caplog.set_level("INFO", "pipeline")
    changes = ("checkpoint.keep=4", "optimizer.lr=0.02", "training.steps=4", f"checkpoint.initialize_from={three}")
    run("pretrain", run_dir, f"data.tokens={tokens}", *changes)
    for said in ("checkpoint.keep=4, was 10", "optimizer.lr=0.02, was 0.01", f"checkpoint.initialize_from={three}, was None"):
        assert f"changed since that checkpoint: {said}" in caplog.text
    assert f"checkpoint.initialize_from={three} has no effect" in caplog.text
    assert "cluster." not in caplog.text
    caplog.clear()
    run("pretrain", run_dir, f"data.tokens={tokens}", *changes, "training.steps=5")
    assert "no effect" not in caplog.text
    assert caplog.text.count("changed since") == 1
