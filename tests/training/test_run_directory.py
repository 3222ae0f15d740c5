"""The files of a run directory agree with each other when a run is extended, forked anew, or beyond its last step."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint import native
from pipeline.common import artifact, events
from pipeline.common.errors import UserError
from pipeline.training import metrics_writer
from tests.training.one_rank import lines, run

#: Settings of a run that ends with an error after some steps, without a checkpoint.
DIVERGES = ("optimizer.weight_decay=3e38", "optimizer.lr=10", "optimizer.min_lr_ratio=1", "training.max_skipped_steps=1")


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory) -> Path:
    """A run of four steps with a checkpoint at each."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run("pretrain", folder, f"data.tokens={tokens}", "training.steps=4")
    return folder


def test_a_run_that_is_extended_is_not_complete_until_it_ends(tokens, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(UserError, match="skipped"):
        run("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=20", "checkpoint.every=0", *DIVERGES)
    assert not (tmp_path / "run" / artifact.MANIFEST).exists()
    run("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=4")
    assert json.loads((tmp_path / "run" / artifact.MANIFEST).read_text())["totals"]["step"] == 4


def test_a_run_that_ended_beyond_training_steps_says_so(tokens, finished, tmp_path, caplog):
    shutil.copytree(finished, tmp_path / "run")
    before = (tmp_path / "run" / artifact.MANIFEST).read_bytes()
    with caplog.at_level(logging.INFO, "pipeline"):
        run("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=2")
    assert "has completed 4 steps, more than training.steps=2, nothing to do" in caplog.text
    assert (tmp_path / "run" / artifact.MANIFEST).read_bytes() == before


def test_a_checkpoint_beyond_training_steps_is_not_taken_for_the_end_of_a_run(tokens, finished, tmp_path):
    """As of a run that was killed on its way to more steps, or of a merge."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / artifact.MANIFEST).unlink()
    with pytest.raises(UserError, match=r"training.steps=2: the newest checkpoint of .* is of step 4, beyond it") as raised:
        run("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=2")
    assert "set it to more than 4" in str(raised.value)
    assert not (tmp_path / "run" / artifact.MANIFEST).exists()


@pytest.mark.parametrize("step", [2, 1, *(pytest.param(step, marks=pytest.mark.long) for step in (3, None))])
def test_a_fork_that_begins_anew_has_one_history(tokens, finished, tmp_path, caplog, step):
    """The first start leaves metrics, and no checkpoint; the second one begins at the same step, a later one, an earlier one, or none."""
    data = (f"data.tokens={tokens}", "checkpoint.every=0", "checkpoint.every_minutes=0")
    first = (*data, f"checkpoint.fork={finished}/step-2", "training.steps=20", *DIVERGES)
    with pytest.raises(UserError, match="skipped"):
        run("pretrain", tmp_path / "run", *first)
    assert next(iter(lines(tmp_path / "run"))) == 3
    assert not native.complete(tmp_path / "run")
    with caplog.at_level(logging.INFO, "pipeline"):
        run("pretrain", tmp_path / "run", *data, "training.steps=6", *([] if step is None else [f"checkpoint.fork={finished}/step-{step}"]))
    found = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(found)) == list(range((step or 0) + 1, 7))
    assert all(line["lr"] < 1 for line in lines(tmp_path / "run").values()), "no line is of the first start"
    assert ("an earlier start, which left no checkpoint, began from step 2" in caplog.text) == (step != 2)
    assert [event["origin"].partition(" of ")[0] for event in events.read(tmp_path / "run") if event["event"] == "run_start"] == [
        "step 2",
        "scratch" if step is None else f"step {step}",
    ]


@given(st.lists(st.integers(0, 30)), st.integers(0, 30), st.integers(0, 30))
def test_lines_of_other_steps_are_removed(tmp_path_factory, steps, first, last):
    path = tmp_path_factory.mktemp("steps") / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + '{"st')
    metrics_writer.keep_steps(path, first, last)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [step for step in steps if first <= step <= last]
