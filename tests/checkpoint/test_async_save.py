"""Asynchronous saves in one process: what is written, what is refused, and what becomes of failures and of dead processes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint import catalog, staging
from pipeline.checkpoint.async_save import AsyncSaver, Node
from pipeline.checkpoint.handover import Commit, LastUpdate
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.save_plan import Held, plan
from pipeline.checkpoint.saver import Outcome, Request
from pipeline.checkpoint.staged_checks import finite_bits, should_have_changed, word_sum
from pipeline.checkpoint.writer_process import WriterProcess
from pipeline.common import locks, signals
from pipeline.common.errors import ToBeContinued, UserError
from pipeline.training.elementwise_optimizers import EagerAdamW
from tests.helpers import ROOT

KINDS = ("weight", "exp_avg", "exp_avg_sq")


class Run:
    """A training run of two weights, and its saver."""

    def __init__(self, run_dir: Path, lock: int | None = None, before_next: float = 60.0) -> None:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.run_dir, self.step, self.lr = run_dir, 0, 0.01
        self.sizes = {"blocks.0.weight": (3, 50), "norm.weight": (7,)}
        self.state = {name: {kind: torch.rand(shape).flatten() for kind in KINDS} for name, shape in self.sizes.items()}
        held = [
            Held(name, shape, tuple((0, size) for size in shape), 0, int(np.prod(shape)), dict.fromkeys(KINDS, "F32"))
            for name, shape in self.sizes.items()
        ]
        self.process = WriterProcess(f"test-{os.getpid()}-{id(self)}")
        self.process.start()
        device = torch.device("cpu")
        node = Node(self.process.name, (0,), 0, 1)
        self.saver = AsyncSaver(run_dir, 0, node, self.process, plan(held), "rank", device, "job", lock, 60.0, before_next)

    def update(self) -> None:
        """A step of the optimizer."""
        self.saver.before_update()
        for tensors in self.state.values():
            tensors["weight"].sub_(self.lr * tensors["exp_avg"] / tensors["exp_avg_sq"].sqrt())
        self.step += 1

    def fragments(self) -> list[Any]:
        return [SimpleNamespace(tensors=tensors) for tensors in self.state.values()]

    def begin(self) -> None:
        update = LastUpdate(self.lr, 0.0, 0.0, 1e-8, self.step)
        index = Index(TrainState(self.step), {})
        self.saver.begin(Request(self.step, self.fragments(), lambda: update, lambda: Commit(index, 9, 0, frozenset())))

    def end(self) -> Outcome:
        self.saver.wait()
        self.saver.wait_for_commit()
        (outcome,) = self.saver.poll()
        return outcome

    def save(self) -> Outcome:
        self.begin()
        return self.end()

    def stored(self, step: int) -> np.ndarray:
        """The bytes of the first weight in the checkpoint of a step."""
        from safetensors import safe_open

        with safe_open(catalog.folder_of(self.run_dir, step) / "rank-00000.safetensors", "np") as file:
            return file.get_tensor("weight/blocks.0.weight[0:3,0:50]@0")


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path)
    yield found
    found.saver.close()


def complete(run: Run) -> list[int]:
    return catalog.read(run.run_dir).complete


def test_a_save_holds_the_state_at_its_beginning(run):
    """Also the second one, in the same buffers, while the next step goes on."""
    for _ in range(2):
        run.update()
        expected = run.state["blocks.0.weight"]["weight"].clone()
        run.begin()
        run.update()
        run.update()
        outcome = run.end()
        assert (outcome.reason, outcome.folder) == ("", catalog.folder_of(run.run_dir, outcome.step))
        assert np.array_equal(run.stored(outcome.step), expected.numpy())
    assert complete(run) == [1, 4]
    assert not list(run.run_dir.glob("checkpoints/.*")), "no partial folder is left"


def test_the_update_waits_for_the_copy(run, monkeypatch):
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
    assert run.end().reason == ""
    assert np.array_equal(run.stored(1), before.numpy())


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
        (planted_copy_once, "was not copied as it was when the save began"),
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


@pytest.mark.parametrize("case", ["lr=0", "tiny lr", "no moments", "skipped step", "one part moves"])
def test_a_weight_may_stay_the_same(run, case):
    if case == "no moments":
        for tensors in run.state.values():
            tensors["exp_avg"].zero_()
    run.lr = {"lr=0": 0.0, "tiny lr": 1e-12}.get(case, 0.01)
    if case == "one part moves":  # like an expert without tokens
        run.state["norm.weight"]["exp_avg"].zero_()
    run.update()
    assert run.save().reason == ""
    if case == "skipped step":
        run.saver.before_update()
    else:
        run.update()
    assert run.save().reason == ""


def test_weights_that_are_not_finite_are_named_and_not_saved(run):
    run.update()
    run.state["norm.weight"]["weight"][3] = torch.inf
    assert run.save().not_finite == "norm.weight"
    assert complete(run) == []


def kill(process: WriterProcess) -> None:
    """Kill a writer process, and wait for its end, which a rank learns of later."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def hand_over(saver: AsyncSaver) -> None:
    """Hand over the save that was begun."""
    saver.before_update()
    saver._staging._thread.join(60)


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


def test_signals_that_end_a_job_do_not_end_the_writer(run):
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        os.kill(run.process.pid, number)
    run.update()
    assert run.save().reason == ""
    assert os.getsid(run.process.pid) == run.process.pid


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


class Job:
    """Ranks of several nodes, all in this process: no call of a saver waits for another rank. Each has a weight of its own."""

    def __init__(self, run_dir: Path, nodes: int, local: int, files: str) -> None:
        (run_dir / "checkpoints").mkdir()
        self.run_dir = run_dir
        self.processes = [WriterProcess(f"test-{os.getpid()}-{id(self)}-{node}") for node in range(nodes)]
        self.weights = [torch.rand(600 + rank) for rank in range(nodes * local)]
        self.savers = []
        for rank, weight in enumerate(self.weights):
            node, count = rank // local, weight.numel()
            first = node * local
            where = Node(self.processes[node].name, tuple(range(first, first + local)), node, nodes)
            shares = plan([Held(f"w{rank}", (count,), ((0, count),), 0, count, {"weight": "F32"})])
            process = self.processes[node] if rank == first else None
            self.savers.append(AsyncSaver(run_dir, rank, where, process, shares, files, torch.device("cpu"), "job", None, 20.0, 20.0))

    def begin(self, rank: int, step: int) -> None:
        """One rank begins a save."""
        fragments: list[Any] = [SimpleNamespace(tensors={"weight": self.weights[rank]})]
        commit = None if rank else lambda: Commit(Index(TrainState(step), {}), 9, 0, frozenset())
        self.savers[rank].begin(Request(step, fragments, lambda: None, commit))

    def save(self, step: int, torn: tuple[int, ...] = (), dying: int | None = None) -> list[list[Outcome]]:
        """The outcomes of the ranks; the copies of some are useless, and a writer dies when it has got those of its node."""
        if dying is not None:
            os.kill(self.processes[dying].pid, signal.SIGSTOP)
        for rank in range(len(self.savers)):
            self.begin(rank, step)
            if rank in torn:
                self.weights[rank].add_(1)
        for saver in self.savers:
            hand_over(saver)
        if dying is not None:
            kill(self.processes[dying])
        for saver in reversed(self.savers):  # a rank tells what it did not hand over when it waits
            saver.wait()
        found = [saver.poll() for saver in self.savers[1:]]
        self.savers[0].wait_for_commit()
        return [self.savers[0].poll(), *found]

    def close(self) -> None:
        for saver in reversed(self.savers):
            saver.close()


@pytest.fixture(params=["rank", "node"])
def job(tmp_path, request):
    found = Job(tmp_path, 2, 2, request.param)
    yield found
    found.close()


def test_ranks_of_several_nodes_write_one_checkpoint_and_learn_of_their_failures(job):
    for step in (1, 2):
        ((outcome,), *others) = job.save(step)
        assert (outcome.reason, others) == ("", [[], [], []])
        checkpoint = Checkpoint(catalog.folder_of(job.run_dir, step))
        for rank, weight in enumerate(job.weights):
            assert torch.equal(checkpoint.tensor(f"w{rank}"), weight)
            weight.add_(1)
    files = sorted(path.name for path in checkpoint.path.glob("*.safetensors"))
    assert files in ([f"rank-{rank:05d}.safetensors" for rank in range(4)], ["node-00000.safetensors", "node-00001.safetensors"])

    job.weights[3][5] = torch.nan
    ((outcome,), *others) = job.save(3)
    assert "w3 contains values that are not finite" in outcome.reason
    assert others[2][0].not_finite == "w3"
    job.weights[3][5] = 0

    ((outcome,), *others) = job.save(4, dying=1)
    assert "writer 1: " in outcome.reason
    assert others[1][0].reason
    assert job.save(5)[0][0].reason == "", "it was started again"

    ((outcome,), *others) = job.save(6, torn=(3,))
    assert "writer 1: weight of w3 changed" in outcome.reason
    assert "weight of w3 changed" in others[2][0].reason
    assert job.save(7)[0][0].reason == ""
    assert catalog.read(job.run_dir).complete == [1, 2, 5, 7]


def test_a_writer_that_can_create_no_file_says_later_that_it_failed(job):
    """Nobody waits until the patience of the commit ends, 20 s."""
    job.save(1)
    before = resource.prlimit(job.processes[1].pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for rank in range(4):
        job.begin(rank, 2)
    for saver in job.savers:
        hand_over(saver)
    job.savers[2].wait()
    (failed,) = job.savers[2].poll()
    assert ("Too many open files" in failed.reason, failed.told) == (True, False), failed
    resource.prlimit(job.processes[1].pid, resource.RLIMIT_NOFILE, before)
    job.savers[0].wait_for_commit()
    (outcome,) = job.savers[0].poll()
    assert "Too many open files" in outcome.reason or "could not write why" in outcome.reason  # there may be no file for the reason yet


@pytest.fixture(params=["rank", "node"])
def node(tmp_path, request):
    """One node of two ranks, which has saved step 1. They wait for 20 s at most, and no test below waits as long."""
    found = Job(tmp_path, 1, 2, request.param)
    assert found.save(1)[0][0].reason == ""
    yield found
    found.close()


def assert_saves(node: Job, step: int) -> None:
    """The next save succeeds, and no partial folder is left."""
    ((outcome,), others) = node.save(step)
    assert (outcome.reason, others) == ("", [])
    assert catalog.read(node.run_dir).complete == [1, step]
    assert not list(node.run_dir.glob("checkpoints/.*"))


def test_a_rank_that_lost_its_writer_is_not_waited_for_by_the_next_one(node):
    """The first rank learns of the end between two saves, the other one when it hands over."""
    first, second = node.savers
    node.begin(1, 2)
    kill(node.processes[0])
    assert first.poll() == []
    node.begin(0, 2)
    hand_over(first)
    hand_over(second)
    (lost,) = second.poll()
    first.wait_for_commit()
    (outcome,) = first.poll()
    assert (lost.reason, outcome.reason) == ("the writer process ended",) * 2
    assert lost.told
    first.wait()
    assert_saves(node, 3)


def test_what_a_rank_gave_to_a_dead_writer_is_not_waited_for_by_the_next_one(tmp_path):
    """It was even told that its data is on the disk."""
    node = Job(tmp_path, 1, 2, "rank")
    assert node.save(1)[0][0].reason == ""
    first, second = node.savers
    node.begin(1, 2)
    second.wait()
    kill(node.processes[0])
    assert first.poll() == []
    node.begin(0, 2)
    hand_over(first)
    assert second.poll() == []
    first.wait_for_commit()
    assert [outcome.reason for outcome in first.poll()] == ["the writer process ended"]
    first.wait()
    assert_saves(node, 3)
    node.close()


def test_a_save_that_was_given_up_is_not_handed_over_to_the_next_writer(node):
    first, second = node.savers
    node.begin(1, 2)
    node.begin(0, 2)
    kill(node.processes[0])
    found = []
    while not found:
        found = first.poll()
    assert "the writer process ended (exit code -9)" in found[0].reason
    hand_over(first)
    hand_over(second)
    second.poll()
    assert_saves(node, 3)


def test_a_rank_that_hands_over_what_the_others_have_given_up_does_not_wait_for_them(node):
    first, second = node.savers
    node.begin(0, 2)
    kill(node.processes[0])
    while not first.poll():
        pass
    assert second.poll() == []
    node.begin(1, 2)
    second.before_update()  # tries to connect
    hand_over(first)
    node.begin(0, 3)
    hand_over(first)
    second.wait()
    node.begin(1, 3)
    hand_over(second)
    for saver in reversed(node.savers):
        saver.wait()
    first.wait_for_commit()
    assert [outcome.reason for outcome in first.poll()] == [""]
    assert not list(node.run_dir.glob("checkpoints/.*"))


def test_a_rank_does_not_wait_for_a_writer_that_others_start_for_the_next_save(node):
    """The one that was started for this save has died, too."""
    second = node.savers[1]
    kill(node.processes[0])
    assert second.poll() == []
    node.begin(1, 2)
    second.before_update()
    node.begin(1, 3)
    assert [outcome.reason for outcome in second.poll()] == ["the writer process is not there"]


def test_a_rank_that_ended_before_it_handed_over_is_not_waited_for(node):
    first, second = node.savers
    node.begin(0, 2)
    node.begin(1, 2)
    hand_over(first)
    second.close()
    first.wait_for_commit()
    assert [outcome.reason for outcome in first.poll()] == ["rank 1 ended before it had handed over its part"]
    first.wait()
    assert not list(node.run_dir.glob("checkpoints/.*"))


def test_a_rank_that_did_not_wait_any_longer_connects_again(tmp_path):
    """The writer goes on, since the first rank still uses it."""
    node = Job(tmp_path, 1, 2, "rank")
    first, second = node.savers
    second._before_next = 0.3
    os.kill(node.processes[0].pid, signal.SIGSTOP)
    node.begin(1, 1)
    node.begin(0, 1)
    hand_over(first)
    hand_over(second)
    node.begin(1, 2)
    assert "was not written when 0 s had been waited for it" in second.poll()[0].reason
    os.kill(node.processes[0].pid, signal.SIGCONT)
    first.wait()
    first.wait_for_commit()
    node.begin(0, 2)
    for saver in node.savers:
        hand_over(saver)
        saver.wait()
    first.wait_for_commit()
    for saver in node.savers:
        saver.poll()
    assert node.save(3)[0][0].reason == ""
    node.close()


def test_nothing_is_written_into_another_run(run):
    run.update()
    run.run_dir.rename(run.run_dir.with_name("moved"))
    (run.run_dir / "checkpoints").mkdir(parents=True)
    assert "was removed or renamed while the run was writing to it" in run.save().reason
    assert not list((run.run_dir / "checkpoints").iterdir())


def _train_and_die(run_dir: str, pipe: Any) -> None:
    """Hand a checkpoint over, and die before it is written."""
    with locks.claimed(Path(run_dir), "run_dir") as lock:
        run = Run(Path(run_dir), lock)
        run.update()
        os.kill(run.process.pid, signal.SIGSTOP)
        run.begin()
        run.update()
        while run.saver._snapshot is None and run.saver._staging._thread.is_alive():
            time.sleep(0.01)
        pipe.send(run.process.pid)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_writer_finishes_what_a_killed_rank_handed_over_and_the_next_job_waits_for_it(tmp_path, caplog):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    rank = context.Process(target=_train_and_die, args=(str(tmp_path), theirs))
    rank.start()
    writer = ours.recv()
    rank.join(60)
    threading.Timer(0.3, os.kill, (writer, signal.SIGCONT)).start()
    with locks.claimed(tmp_path, "run_dir"):
        assert catalog.read(tmp_path).complete == [1]
    assert "waiting until its last checkpoint is written" in caplog.text


@pytest.fixture
def last_write(tmp_path, monkeypatch):
    """A process that writes the last checkpoint of a dead job, and does not end."""
    monkeypatch.setattr(signals, "received", set())
    with locks.claimed(tmp_path, "run_dir") as lock, subprocess.Popen(["sleep", "1000"], pass_fds=[lock]) as process:
        locks.note_last_write(lock)
        yield process
        process.kill()


@pytest.mark.usefixtures("last_write")
def test_a_job_that_waits_for_the_last_checkpoint_of_a_dead_one_ends_in_time(tmp_path):
    named = rf"still held after 0.005 minutes \(training.timeout_minutes\): .*, process \d+ on {socket.gethostname()}"
    with pytest.raises(UserError, match=named), locks.claimed(tmp_path, "run_dir", minutes=0.005):
        pass


@pytest.mark.usefixtures("last_write")
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGUSR1, 75)])
def test_a_job_that_waits_for_the_last_checkpoint_of_a_dead_one_reacts_to_signals(tmp_path, number, code):
    before = signal.getsignal(number)
    signals.record(number)
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    try:
        with pytest.raises(ToBeContinued) as stopped, locks.claimed(tmp_path, "run_dir", minutes=1):
            pass
    finally:
        signal.signal(number, before)
    assert stopped.value.code == code


def test_a_running_job_is_not_waited_for(tmp_path):
    refused = pytest.raises(UserError, match="is being written by another job")
    with locks.claimed(tmp_path, "run_dir"), refused, locks.claimed(tmp_path, "run_dir"):
        pass


def test_the_writer_loads_no_torch():
    program = "import sys, pipeline.checkpoint.writer\nprint(*{'torch', 'safetensors.torch', 'deepspeed', 'hydra'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checks_of_bytes(dtype):
    values = torch.randn(1001).to(dtype)
    data = memoryview(values.view(torch.uint8).numpy())
    size, name = values.element_size(), {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert word_sum(data, size) == (word_sum(data[:600], size) + word_sum(data[600:], size)) % 2**32
    assert finite_bits(data, name)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = values.clone()
        spoiled[77] = bad
        spoiled_data = memoryview(spoiled.view(torch.uint8).numpy())
        assert not finite_bits(spoiled_data, name)
        assert word_sum(spoiled_data, size) != word_sum(data, size)
    largest = torch.full((9,), torch.finfo(dtype).max, dtype=dtype)
    assert finite_bits(memoryview(largest.view(torch.uint8).numpy()), name), "the sum overflows"


@pytest.mark.parametrize("lr", [1e-2, 1e-4, 1e-6, 1e-8])
def test_an_update_of_adamw_that_changed_a_weight_is_recognized_and_no_other(lr):
    weight = torch.nn.Parameter(torch.randn(2000))
    optimizer = EagerAdamW([weight], lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for updates in range(1, 8):
        before = weight.detach().clone()
        weight.grad = torch.randn(2000)
        optimizer.step()
        state = [optimizer.state[weight][name].numpy() for name in ("exp_avg", "exp_avg_sq")]
        update = LastUpdate(lr, 0.9, 0.95, 1e-8, updates)
        recognized = should_have_changed(weight.detach().numpy(), *state, update)
        assert recognized or lr < 1e-6, "at such rates most updates are lost in rounding"
        assert not (recognized and torch.equal(before, weight))
        for name in range(0, 2000, 50):
            one = [values[name : name + 1] for values in (weight.detach().numpy(), *state)]
            if should_have_changed(*one, update):
                assert before[name] != weight[name]


def test_a_commit_leaves_what_a_rank_that_is_ahead_writes_of_the_next_checkpoint(run):
    run.update()
    early = run.run_dir / "checkpoints" / ".step-00000002.job-2.partial"
    early.mkdir()
    assert run.save().reason == ""
    assert early.is_dir()


def test_a_rank_that_is_a_save_ahead_of_another_does_not_stop_the_save(tmp_path):
    """Nor is its file of the next checkpoint lost."""
    job = Job(tmp_path, 1, 3, "rank")

    def save(rank: int, step: int) -> None:
        job.begin(rank, step)
        job.savers[rank].wait()

    for rank, step in ((1, 1), (1, 2), (2, 1), (0, 1), (2, 2), (0, 2)):
        save(rank, step)
    job.savers[0].wait_for_commit()
    assert [outcome.reason for outcome in job.savers[0].poll()] == ["", ""]
    for step in (1, 2):
        checkpoint = Checkpoint(catalog.folder_of(tmp_path, step))
        assert all(torch.equal(checkpoint.tensor(f"w{rank}"), weight) for rank, weight in enumerate(job.weights))
    job.close()
