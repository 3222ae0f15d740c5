"""The lock of an output folder: tasks of one job array acquire and release it concurrently, and none is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.data.unfinished import claimed
from pipeline.errors import UserError


def test_tasks_of_an_array_can_lock_while_others_release(tmp_path: Path) -> None:
    lock, inside, prepared = threading.Lock(), 0, []

    def task(_: int) -> None:
        nonlocal inside
        with claimed(tmp_path, "data.shards", "7", lambda: prepared.append(inside)):
            with lock:
                inside += 1
            with lock:
                inside -= 1

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(task, range(600)))
    assert prepared
    assert not any(prepared), "the folder was prepared while another task held the lock"


def test_a_job_outside_the_array_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="written by another job: job array 7")
    with claimed(tmp_path, "data.shards", "7"), refused, claimed(tmp_path, "data.shards"):
        pass
