"""The lock of a folder that is being written: tasks of one job array come and go, and none is sent away."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.data.unfinished import claimed
from pipeline.errors import UserError


def test_tasks_of_an_array_that_come_as_others_leave_are_let_in(tmp_path: Path) -> None:
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
    assert not any(prepared), "the folder was made ready while another task was at work"


def test_a_job_that_is_no_task_of_the_array_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="written by another job: job array 7")
    with claimed(tmp_path, "data.shards", "7"), refused, claimed(tmp_path, "data.shards"):
        pass
