"""The lock of an output folder, which tasks of one job array acquire and release concurrently; and whose files it may hold."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.common.locks import claimed
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


def begin(folder: Path, array: str | None = None, **settings: object) -> None:
    """Begin or continue a run and leave it unfinished."""
    with work(SingleProcessComm(), folder, ("data.tokens", "tokenize"), settings, str, ["*.tar"], array=array) as unfinished:
        assert unfinished
        unfinished.write("part", settings)


@pytest.mark.parametrize("array", [None, "7"])
def test_other_settings_do_not_discard_an_unfinished_run(tmp_path: Path, array: str | None) -> None:
    begin(tmp_path, array, a=1, b=[2])
    with pytest.raises(UserError, match=r"^1 problem:\n  - b=\[3\]: .* holds an unfinished run with b=\[2\]"):
        begin(tmp_path, array, a=1, b=[3])
    assert (tmp_path / ".unfinished/part.json").read_text() == '{"a": 1, "b": [2]}'
    begin(tmp_path, array, a=1, b=[2])


def test_a_task_of_an_array_with_other_settings_is_refused_while_the_first_works(tmp_path: Path) -> None:
    begin(tmp_path, "7", a=1)
    with claimed(tmp_path, "data.tokens", "7"), pytest.raises(UserError, match="holds an unfinished run with a=1"):
        begin(tmp_path, "7", a=2)


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


def test_files_that_a_run_would_overwrite_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    begin(tmp_path / "beside", a=1)
    for number in range(7):
        (tmp_path / f"train-{number}.tar").write_text("mine")
    (tmp_path / ".x.7.partial").write_text("mine")
    with pytest.raises(UserError, match=r"another run or program: train-0\.tar, train-1\.tar, .*, \.\.\.\n"):
        begin(tmp_path, a=1)
    assert len(list(tmp_path.iterdir())) == 10, "nothing is added or removed"
