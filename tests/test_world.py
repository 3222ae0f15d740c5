"""The ranks of the tests: one that ends fails its test, and the next test has others."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist


def ended(rank: int) -> None:
    """End a rank as a fault of memory does."""
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)


def size() -> int:
    return dist.get_world_size()


def test_a_rank_that_ends_fails_its_test_and_no_other(worlds) -> None:
    ranks = worlds(2)
    with pytest.raises(AssertionError, match="rank 1 ended with exit code -11"):
        ranks.run(ended, 1)
    assert ranks.run(size) == [2, 2]


def test_a_rank_that_ended_between_two_tests(worlds) -> None:
    ranks = worlds(2)
    ranks.run(size)
    ranks._ranks[0].kill()
    with pytest.raises(AssertionError, match="rank 0 ended with exit code -9"):
        ranks.run(size)
    assert ranks.run(size) == [2, 2]
