"""Atomic files, and outputs that cannot be written: messages name folder and reason, no error of an input is taken for one of an output."""

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

from pipeline.common.atomic_files import atomic_file, atomic_folder, make_folder, report_disk_full
from pipeline.common.errors import UserError
from tests.checkpoint import small_checkpoints
from tests.tools.test_checkpoint import tool  # noqa: F401 - a fixture


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_the_reason_is_reported(tmp_path, number):
    said = re.escape(f"output folder={tmp_path}: cannot be written: {os.strerror(number)}")
    with pytest.raises(UserError, match=said), report_disk_full(tmp_path):
        raise RuntimeError("of a library") from OSError(number, os.strerror(number), str(tmp_path / "x"))


def test_the_folder_of_the_file_is_named_if_it_is_another_one(tmp_path):
    with pytest.raises(UserError, match="output folder=/elsewhere: cannot be written"), report_disk_full(tmp_path / "run"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/elsewhere/file")


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "x"), PermissionError(errno.EACCES, "x"), KeyError("x")])
def test_other_errors_pass(tmp_path, error):
    """Those of inputs, and defects."""
    with pytest.raises(type(error)), report_disk_full(tmp_path):
        raise error


def test_whoever_waits_for_a_file_may_rename_its_folder(tmp_path, monkeypatch):
    """A checkpoint is complete as soon as its last record is there."""
    (tmp_path / "partial").mkdir()
    replace = os.replace

    def replaced(source, target):
        replace(source, target)
        os.rename(tmp_path / "partial", tmp_path / "complete")

    monkeypatch.setattr(os, "replace", replaced)
    with atomic_file(tmp_path / "partial" / "record", "w") as file:
        file.write("all")
    assert (tmp_path / "complete" / "record").read_text() == "all"
    assert [path.name for path in (tmp_path / "complete").iterdir()] == ["record"]


def test_places_that_hold_no_files():
    """Not even for root."""
    for folder in ("/proc", "/proc/new"):
        with pytest.raises(UserError, match=f"stage.out={folder}: cannot be written: No such file or directory"):
            make_folder(Path(folder), "stage.out")
    for write in (atomic_file, atomic_folder):
        with pytest.raises(UserError, match="cannot be written"), report_disk_full(Path("/proc")), write(Path("/proc/new")):
            pass


def test_a_folder_is_probed_without_a_trace(tmp_path):
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.fixture
def read_only(tmp_path):
    """A run directory on a file system that is mounted read-only, which root cannot write either."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a file system requires root")
    try:
        for step in (1, 2):
            small_checkpoints.write(folder / "run", small_checkpoints.state(step), step)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield folder / "run"
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_read_only_run_directory(tool, read_only):  # noqa: F811 - the fixture
    for words in (("keep", read_only, "best"), ("keep", read_only, "--remove")):
        code, text = tool(*words)
        assert code == 2
        assert "cannot be written: Read-only file system" in text
    with pytest.raises(UserError, match=f"run_dir={read_only}: cannot be written: Read-only file system"):
        make_folder(read_only, "run_dir")
