"""checkpoint.fork: a new run directory continues a checkpoint of another one, with another schedule, length or later data."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint import native
from pipeline.common.errors import UserError
from tests.training.one_rank import lines, newest, run

END = "training.steps=4"


@pytest.fixture(scope="module")
def trunk(tokens, tmp_path_factory) -> Path:
    """Four steps at a constant rate."""
    folder = tmp_path_factory.mktemp("trunk") / "run"
    run("pretrain", folder, f"data.tokens={tokens}", "training.steps=4", "optimizer.schedule=constant")
    return folder


def cooldown(tokens: Path, *settings: object) -> tuple[object, ...]:
    return (f"data.tokens={tokens}", "optimizer.schedule=wsd", "optimizer.min_lr_ratio=0", *settings)


def test_a_fork_continues_with_another_schedule_and_records_its_parent(tokens, trunk, tmp_path, caplog):
    decay = cooldown(tokens, f"checkpoint.fork={trunk}/step-2", "optimizer.decay_steps=3", "training.steps=5")
    with caplog.at_level(logging.INFO, "pipeline"):
        run("pretrain", tmp_path / "run", *decay)
    assert f"fork of {trunk}/checkpoints/step-00000002: step 2, 8 samples" in caplog.text
    assert "optimizer.schedule=wsd, was constant" in caplog.text
    assert "training.steps=5, was 4" in caplog.text
    ours, theirs = lines(tmp_path / "run"), lines(trunk)
    assert list(ours) == [3, 4, 5]
    assert (ours[3]["loss"], ours[3]["samples"]) == (theirs[3]["loss"], theirs[3]["samples"]), "weights and samples are those of the trunk"
    assert ours[4]["loss"] != theirs[4]["loss"], "the rate is another one"
    assert [line["lr"] for line in ours.values()] == pytest.approx([0.02 / 3, 0.01 / 3, 0])
    parent = {"path": str(trunk / "checkpoints" / "step-00000002"), "step": 2, "how": "fork"}
    assert newest(tmp_path / "run").parent == parent
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["totals"]["parent"] == parent
    assert newest(trunk).parent is None


def test_cooldowns_of_one_trunk_read_its_samples_at_rates_of_their_own(tokens, trunk, tmp_path):
    theirs = lines(trunk)
    for steps, shape, rates in ((1, "linear", [0]), (2, "sqrt", [0.01 * (1 - 0.5**0.5), 0]), (3, "cosine", [0.0075, 0.0025, 0])):
        fork = f"checkpoint.fork={trunk}/step-{4 - steps}"
        run("pretrain", tmp_path / shape, *cooldown(tokens, fork, f"optimizer.decay_steps={steps}", f"optimizer.decay_shape={shape}"), END)
        ours = lines(tmp_path / shape)
        assert [line["lr"] for line in ours.values()] == pytest.approx(rates, abs=1e-9)
        assert [line["samples"] for line in ours.values()] == [theirs[step]["samples"] for step in ours]
        assert ours[5 - steps]["loss"] == theirs[5 - steps]["loss"], "the first step has the weights and the samples of the trunk"


def test_one_run_with_several_decays_keeps_their_checkpoints_and_continues_exactly(tokens, tmp_path):
    settings = cooldown(tokens, "optimizer.decay_ends=[2,4]", "optimizer.decay_steps=1", "training.steps=7", "checkpoint.every=5")
    keep = ("checkpoint.keep=1",)
    run("pretrain", tmp_path / "run", *settings, *keep)
    before = lines(tmp_path / "run")
    assert [line["lr"] for line in before.values()] == pytest.approx([0.01, 0, 0.01, 0, 0.01, 0.01, 0])
    folders = native.complete(tmp_path / "run")
    assert [folder.name for folder in folders] == ["step-00000002", "step-00000004", "step-00000007"]
    shutil.rmtree(folders[-1])
    (tmp_path / "run" / "checkpoints" / "catalog.json").unlink()
    run("pretrain", tmp_path / "run", *settings, *keep)
    after = lines(tmp_path / "run")
    assert [(line["loss"], line["grad_norm"], line["lr"]) for line in after.values()] == [
        (line["loss"], line["grad_norm"], line["lr"]) for line in before.values()
    ]


@pytest.mark.parametrize("named", ["", *(pytest.param(name, marks=pytest.mark.long) for name in ("/step-4", "/checkpoints/step-00000004"))])
def test_the_same_command_continues_a_fork(tokens, trunk, tmp_path, named, caplog):
    """Also when the trunk has trained on, or is gone."""
    shutil.copytree(trunk, tmp_path / "trunk")
    fork = cooldown(tokens, f"checkpoint.fork={tmp_path}/trunk{named}", "optimizer.decay_steps=2")
    run("pretrain", tmp_path / "run", *fork, "training.steps=5")
    before = newest(tmp_path / "run")
    shutil.rmtree(tmp_path / "trunk")
    with caplog.at_level(logging.INFO, "pipeline"):
        run("pretrain", tmp_path / "run", *fork, "training.steps=6")
    assert "continuing from" in caplog.text
    assert "step 5, 20 samples" in caplog.text
    assert newest(tmp_path / "run").parent == before.parent
    assert before.parent["step"] == 4
    run("pretrain", tmp_path / "run", *fork[:3], "training.steps=7")  # without checkpoint.fork
    assert newest(tmp_path / "run").parent == before.parent


def test_a_fork_of_a_fork_and_one_of_weights_alone(tokens, trunk, tmp_path):
    run("pretrain", tmp_path / "a", f"data.tokens={tokens}", f"checkpoint.fork={trunk}", "training.steps=5")
    run("pretrain", tmp_path / "b", f"data.tokens={tokens}", f"checkpoint.fork={tmp_path}/a", "training.steps=6")
    assert newest(tmp_path / "b").parent == {"path": f"{tmp_path}/a/checkpoints/step-00000005", "step": 5, "how": "fork"}
    run("pretrain", tmp_path / "c", f"data.tokens={tokens}", f"checkpoint.initialize_from={trunk}", "training.steps=1")
    assert newest(tmp_path / "c").parent == {"path": f"{trunk}/checkpoints/step-00000004", "step": 4, "how": "initialize_from"}


REFUSED = [
    (
        ("model.layers=2", "training.seed=3", "training.sequence_length=16", "optimizer.name=lion", "data.packing=best_fit"),
        "model.layers=2: {trunk}/checkpoints/step-00000004 was made with 1|training.seed=3: |training.sequence_length=16: |"
        "optimizer.name=lion: {trunk}/checkpoints/step-00000004 was made with adamw|"
        "data.packing=best_fit: {trunk}/checkpoints/step-00000004 was made with windows",
    ),
    (("training.steps=4",), "training.steps=4: leaves no step to train: checkpoint.fork={trunk}/checkpoints/step-00000004 is of step 4"),
    (
        ("checkpoint.fork={trunk}/step-7",),
        "checkpoint.fork={trunk}/step-7: is not a complete checkpoint; {trunk} has those of steps 1, 2, 3, 4",
    ),
    (("checkpoint.fork={trunk}/no",), "checkpoint.fork={trunk}/no: contains no checkpoint"),
    (("checkpoint.initialize_from={trunk}",), "checkpoint.initialize_from={trunk}: starts the run, and so does checkpoint.fork"),
    (("checkpoint.resume={trunk}/step-2",), "checkpoint.resume={trunk}/step-2: must be auto or none|set checkpoint.fork={trunk}/step-2"),
]


@pytest.mark.parametrize("settings, said", REFUSED)
def test_what_is_refused(tokens, trunk, tmp_path, settings, said):
    words = [word.format(trunk=trunk) for word in settings]
    with pytest.raises(UserError) as raised:
        run("pretrain", tmp_path / "run", f"data.tokens={tokens}", f"checkpoint.fork={trunk}", "training.steps=6", *words)
    for text in said.format(trunk=trunk).split("|"):
        assert text in str(raised.value)
    assert not native.complete(tmp_path / "run")


def test_one_history_in_a_run_directory(tokens, trunk, tmp_path):
    """A fork into a run directory with another beginning is refused, and so is one with resume=none."""
    data = f"data.tokens={tokens}"
    run("pretrain", tmp_path / "run", data, f"checkpoint.fork={trunk}/step-2", "training.steps=3")
    for settings in (f"checkpoint.fork={trunk}/step-3",), (f"checkpoint.fork={trunk}/step-2", "checkpoint.resume=none"):
        with pytest.raises(UserError, match=r"do not continue from it, the newest of step 3"):
            run("pretrain", tmp_path / "run", data, *settings, "training.steps=9")
    with pytest.raises(UserError, match=r"checkpoint.fork=.*do not continue from it, the newest of step 4"):
        run("pretrain", trunk, data, f"checkpoint.fork={trunk}/step-2", "training.steps=9")
    assert newest(trunk).train_state.step == 4


def test_a_damaged_trunk_is_reported_and_not_set_aside(tokens, trunk, tmp_path):
    shutil.copytree(trunk, tmp_path / "trunk")
    for file in (tmp_path / "trunk" / "checkpoints" / "step-00000004").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    settings = (f"data.tokens={tokens}", f"checkpoint.fork={tmp_path}/trunk", "checkpoint.skip_damaged=true", "training.steps=6")
    with pytest.raises(UserError, match="step-00000004"):
        run("pretrain", tmp_path / "run", *settings)
    assert len(native.complete(tmp_path / "trunk")) == 4


@pytest.fixture
def other_tokens(tokens, tmp_path) -> Path:
    """Token shards that count as other ones by their manifest."""
    folder = tmp_path / "other"
    shutil.copytree(tokens, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    next(iter(manifest["files"].values()))["xxh3"] = "0" * 32
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_fork_may_read_other_data_of_the_same_tokenizer(tokens, other_tokens, trunk, tmp_path, caplog):
    other = (f"data.tokens={other_tokens}", "training.steps=6")
    with caplog.at_level(logging.INFO, "pipeline"):
        run("pretrain", tmp_path / "run", *other, f"checkpoint.fork={trunk}")
    assert f"other data from sample 16 on: data.tokens={other_tokens}, was {tokens}" in caplog.text
    with pytest.raises(UserError, match=r"data.tokens=.* with other content"):
        run("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=7")  # a run that continues, continues its data
    manifest = json.loads((other_tokens / "manifest.json").read_text())
    manifest["totals"]["tokenizer"] = "another"
    (other_tokens / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"data.tokens=.*: is of another tokenizer than data.tokens="):
        run("pretrain", tmp_path / "second", *other, f"checkpoint.fork={trunk}")


def test_a_damaged_index_is_set_aside_in_a_fork_too(tokens, trunk, tmp_path, caplog):
    """Its parent is that of the checkpoint before."""
    settings = (f"data.tokens={tokens}", f"checkpoint.fork={trunk}/step-2", "checkpoint.skip_damaged=true")
    run("pretrain", tmp_path / "run", *settings, "training.steps=4")
    parent = newest(tmp_path / "run").parent
    (native.folder_of(tmp_path / "run", 4) / native.INDEX).write_text("{}")
    run("pretrain", tmp_path / "run", *settings, "training.steps=5")
    assert "step-00000004.damaged" in caplog.text
    assert (newest(tmp_path / "run").train_state.step, newest(tmp_path / "run").parent) == (5, parent)
