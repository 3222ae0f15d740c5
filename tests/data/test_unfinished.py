"""The lock of an output folder, which tasks of one job array acquire and release concurrently, and its unfinished runs."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.common.locks import FILE, claimed, refuse_held
from pipeline.common.mpi import SingleProcessComm
from pipeline.common.unfinished import Unfinished, work


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


def test_further_tasks_of_an_array_hold_the_lock_when_the_first_has_ended(tmp_path: Path) -> None:
    with claimed(tmp_path, "data.shards", "7"):
        (tmp_path / FILE).write_text(f"job array 7, process 99999999 on {socket.gethostname()}\n")
        with pytest.raises(UserError, match="written by another job: job array 7"):
            refuse_held(tmp_path, "data.shards")


def begin(folder: Path, array: str | None = None, **settings: object) -> None:
    """Begin or continue a run and leave it unfinished."""
    with work(SingleProcessComm(), folder, ("data.tokens", "tokenize"), settings, str, ["*.tar"], array=array) as unfinished:
        assert unfinished
        unfinished.write("part", settings)


def test_a_task_of_an_array_with_other_settings_is_refused_while_the_first_works(tmp_path: Path) -> None:
    begin(tmp_path, "7", a=1, b=[2])
    refused = pytest.raises(UserError, match=r"^1 problem:\n  - b=\[3\]: .* holds an unfinished run with b=\[2\]")
    with claimed(tmp_path, "data.tokens", "7"), refused:
        begin(tmp_path, "7", a=1, b=[3])
    assert (tmp_path / ".unfinished/part.json").read_text() == '{"a": 1, "b": [2]}'
    begin(tmp_path, "7", a=1, b=[2])


def test_a_job_that_starts_while_another_one_completes_the_folder_does_nothing(tmp_path: Path, monkeypatch) -> None:
    begin(tmp_path, "7", a=1)
    take_over = Unfinished.take_over

    def completed_before(unfinished: Unfinished, *arguments: object) -> None:
        (tmp_path / "train-0.tar").write_text("of the other job")
        unfinished.clear()
        artifact.write(tmp_path, artifact.Manifest("tokenize", {"a": 1}, {}))
        take_over(unfinished, *arguments)

    monkeypatch.setattr(Unfinished, "take_over", completed_before)
    with work(SingleProcessComm(), tmp_path, ("data.tokens", "tokenize"), {"a": 1}, str, ["*.tar"]) as unfinished:
        assert unfinished is None
