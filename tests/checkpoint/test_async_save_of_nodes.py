"""Asynchronous saves of several ranks and nodes, all in one process: no rank waits for one that failed."""

from __future__ import annotations

import os
import resource
import signal

import pytest
import torch

from pipeline.checkpoint import catalog
from pipeline.checkpoint.reader import Checkpoint
from tests.checkpoint.async_runs import Job, hand_over, kill


@pytest.fixture(params=["rank", pytest.param("node", marks=pytest.mark.long)])
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


@pytest.fixture(params=["rank", pytest.param("node", marks=pytest.mark.long)])
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
