"""Asynchronous saves of one rank: what is written, what is refused, and what becomes of failures."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.checkpoint import catalog, staging
from tests.checkpoint.async_runs import Run, complete, hand_over, kill
from tests.helpers import ROOT


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path)
    yield found
    found.saver.close()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """A run of several tests, each of which leaves it able to save."""
    found = Run(tmp_path_factory.mktemp("lasting"))
    yield found
    found.saver.close()


def test_a_save_holds_the_state_at_its_beginning(lasting):
    """Also the second one, in the same buffers, while the next step goes on."""
    run, saved = lasting, []
    for _ in range(2):
        run.update()
        expected = run.state["blocks.0.weight"]["weight"].clone()
        run.begin()
        run.update()
        run.update()
        outcome = run.end()
        assert (outcome.reason, outcome.folder) == ("", catalog.folder_of(run.run_dir, outcome.step))
        assert np.array_equal(run.stored(outcome.step), expected.numpy())
        saved.append(outcome.step)
    assert complete(run)[-2:] == saved
    assert not list(run.run_dir.glob("checkpoints/.*")), "no partial folder is left"


def test_the_update_waits_for_the_copy(lasting, monkeypatch):
    run = lasting
    begun, may_copy = threading.Event(), threading.Event()

    def slow(live, target, copy=staging.copy):
        begun.set()
        assert may_copy.wait(60)
        copy(live, target)

    monkeypatch.setattr(staging, "copy", slow)
    run.update()
    before = run.state["blocks.0.weight"]["weight"].clone()
    run.begin()
    assert begun.wait(60), "the copy begins without the trainer"
    updating = threading.Thread(target=run.update)
    updating.start()
    updating.join(0.2)
    assert updating.is_alive()
    assert torch.equal(run.state["blocks.0.weight"]["weight"], before)
    may_copy.set()
    updating.join(60)
    outcome = run.end()
    assert outcome.reason == ""
    assert np.array_equal(run.stored(outcome.step), before.numpy())


def planted_without_copy(_run, monkeypatch):
    monkeypatch.setattr(staging, "copy", lambda _live, _target: None)


def planted_copy_once(_run, monkeypatch):
    seen = set()

    def copy_once(live, target, copy=staging.copy):
        if target.data_ptr() not in seen:
            copy(live, target)
        seen.add(target.data_ptr())

    monkeypatch.setattr(staging, "copy", copy_once)


def planted_first_weights(run, _monkeypatch):
    """The saver gets clones of the first state for ever."""
    fragments = [SimpleNamespace(tensors={kind: t.clone() for kind, t in f.tensors.items()}) for f in run.fragments()]
    run.fragments = lambda: fragments


def planted_change(run, monkeypatch):
    """A weight changes in the forward pass, while it is copied."""

    def changed(live, target, copy=staging.copy):
        copy(live, target)
        run.state["norm.weight"]["weight"][0] += 1

    monkeypatch.setattr(staging, "copy", changed)


def planted_hidden_change(run, monkeypatch):
    """The same, through an alias that PyTorch's versions do not see."""

    def changed(live, target, copy=staging.copy):
        run.state["norm.weight"]["weight"].numpy()[0] += 1
        copy(live, target)

    monkeypatch.setattr(staging, "copy", changed)


@pytest.mark.parametrize(
    "plant, reason",
    [
        (planted_without_copy, "was not copied as it was when the save began"),
        pytest.param(planted_copy_once, "was not copied as it was when the save began", marks=pytest.mark.long),
        (planted_first_weights, "weight equals the previous save, although its last update changed it"),
        (planted_change, "weight of norm.weight changed between the beginning of the save and the end of its copy"),
        (planted_hidden_change, "of norm.weight was not copied as it was when the save began"),
    ],
)
def test_a_stale_or_torn_copy_is_refused_by_name(run, monkeypatch, plant, reason):
    run.update()
    plant(run, monkeypatch)
    outcomes = [run.save()]
    run.update()
    outcomes.append(run.save())
    found = [outcome.reason for outcome in outcomes if outcome.reason]
    assert found
    assert reason in found[0]
    assert any(name in found[0] for name in run.sizes)
    assert complete(run) == [outcome.step for outcome in outcomes if not outcome.reason]
    monkeypatch.undo()
    run.fragments = Run.fragments.__get__(run)
    run.update()
    assert run.save().reason == "", "the next save is another try"


@pytest.mark.parametrize(
    "case", ["lr=0", "skipped step", *(pytest.param(case, marks=pytest.mark.long) for case in ("tiny lr", "no moments", "one part moves"))]
)
def test_a_weight_may_stay_the_same(lasting, monkeypatch, case):
    run = lasting
    monkeypatch.setattr(run, "lr", {"lr=0": 0.0, "tiny lr": 1e-12}.get(case, 0.01))
    still = {"no moments": run.state, "one part moves": ["norm.weight"]}.get(case, [])  # like an expert without tokens
    for name in still:
        monkeypatch.setitem(run.state[name], "exp_avg", torch.zeros_like(run.state[name]["exp_avg"]))
    run.update()
    assert run.save().reason == ""
    if case == "skipped step":
        run.saver.before_update()
    else:
        run.update()
    assert run.save().reason == ""


def test_weights_that_are_not_finite_are_named_and_not_saved(lasting):
    lasting.update()
    weight, before = lasting.state["norm.weight"]["weight"], complete(lasting)
    finite = weight.clone()
    weight[3] = torch.inf
    assert lasting.save().not_finite == "norm.weight"
    assert complete(lasting) == before
    weight.copy_(finite)


def test_a_dead_writer_fails_a_save_and_is_started_again(run):
    run.update()
    os.kill(run.process.pid, signal.SIGSTOP)
    run.begin()
    hand_over(run.saver)
    kill(run.process)
    assert "the writer process ended (exit code -9)" in run.end().reason
    run.update()
    assert run.save().reason == ""
    assert complete(run) == [2]


def test_a_writer_that_dies_between_two_saves_or_before_the_hand_over_costs_no_checkpoint(run):
    kill(run.process)
    run.update()
    assert run.save().reason == ""
    run.update()
    run.begin()
    kill(run.process)
    hand_over(run.saver)
    assert run.end().reason == ""
    assert complete(run) == [1, 2]


@pytest.mark.long
def test_a_writer_that_dies_as_it_removes_old_checkpoints_leaves_nothing(run):
    run.update()
    assert run.save().reason == ""
    for name in (".step-00000000.retired", ".catalog.json.1.partial"):
        (run.run_dir / "checkpoints" / name).mkdir()
    kill(run.process)
    run.saver.close()
    assert sorted(path.name for path in (run.run_dir / "checkpoints").iterdir()) == ["catalog.json", "step-00000001"]


def test_a_save_that_takes_too_long_is_given_up_when_the_next_one_is_due(tmp_path):
    run = Run(tmp_path, before_next=0.3)
    run.update()
    os.kill(run.process.pid, signal.SIGSTOP)
    run.begin()
    run.update()
    run.begin()
    assert "was not written when 0 s had been waited for it" in run.saver.poll()[0].reason
    assert run.end().reason == ""
    assert complete(run) == [2]
    run.saver.close()


def test_signals_that_end_a_job_do_not_end_the_writer(lasting):
    writer = lasting.process.pid
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        os.kill(writer, number)
    lasting.update()
    assert lasting.save().reason == ""
    assert os.getsid(writer) == lasting.process.pid == writer


def test_a_failed_save_says_why_and_leaves_nothing(run):
    run.update()
    (run.run_dir / "checkpoints" / ".step-00000001.job-1.partial").touch()  # a folder cannot be made there
    assert "File exists" in run.save().reason
    (run.run_dir / "checkpoints" / ".step-00000001.job-0.partial").mkdir()  # a node wrote after the attempt was given up
    run.update()
    assert run.save().reason == ""
    assert [path.name for path in (run.run_dir / "checkpoints").iterdir() if path.is_dir()] == ["step-00000002"]


def test_a_full_disk_fails_a_save_and_the_next_one_succeeds(run):
    """A limit of the size of files has the same effect: for the data, the index, and what else there is."""
    run.update()
    folder = run.save().folder
    for path in sorted(folder.iterdir()):
        run.update()
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (path.stat().st_size - 1, resource.RLIM_INFINITY))
        assert "File too large" in run.save().reason, path.name
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert [found.name for found in (run.run_dir / "checkpoints").glob("*step*")] == [folder.name], path.name
    run.update()
    assert run.save().reason == ""


@pytest.mark.long
def test_a_disk_without_space_for_the_reason_fails_a_save_at_once(run):
    """Neither the data nor the file that tells of the failure can be written: nobody waits for them."""
    run.update()
    data = run.save().folder / "rank-00000.safetensors"
    run.update()
    partial = run.run_dir / "checkpoints" / ".step-00000002.job-2.partial"
    (partial / f".failed-00000.json.{run.process.pid}.partial").mkdir(parents=True)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (data.stat().st_size - 1, resource.RLIM_INFINITY))
    run.begin()
    run.saver.wait()
    outcomes, end = run.saver.poll(), time.monotonic() + 10
    while run.saver._pending is not None and time.monotonic() < end:
        time.sleep(0.01)
        outcomes += run.saver.poll()
    assert [outcome.reason for outcome in outcomes] == ["[Errno 27] File too large"]
    assert run.saver._pending is None, "the commit still waits for the record"
    assert not partial.exists()
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.update()
    assert run.save().reason == ""


def test_nothing_is_written_into_another_run(run):
    run.update()
    run.run_dir.rename(run.run_dir.with_name("moved"))
    (run.run_dir / "checkpoints").mkdir(parents=True)
    assert "was removed or renamed while the run was writing to it" in run.save().reason
    assert not list((run.run_dir / "checkpoints").iterdir())


def test_the_writer_loads_no_torch():
    program = "import sys, pipeline.checkpoint.writer\nprint(*{'torch', 'safetensors.torch', 'deepspeed', 'hydra'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_a_commit_leaves_what_a_rank_that_is_ahead_writes_of_the_next_checkpoint(lasting):
    lasting.update()
    early = lasting.run_dir / "checkpoints" / f".step-{lasting.step + 1:08d}.job-{lasting.step + 1}.partial"
    early.mkdir()
    assert lasting.save().reason == ""
    assert early.is_dir()
    early.rmdir()
