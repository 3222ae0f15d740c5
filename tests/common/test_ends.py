"""Records of the ends of ranks: the first failure, a bounded number of files, and what is printed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pipeline.common import ends, signals
from pipeline.common.errors import UserError
from pipeline.config import compose


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ends.VARIABLE, str(tmp_path))
    return tmp_path


def test_the_first_failures_are_recorded_in_order(folder: Path) -> None:
    assert not ends.any_failed(folder)
    places = [ends.record(1, f"ValueError: {number}", rank=number) for number in range(20)]
    assert places == [*range(ends.RECORDS), *[None] * (20 - ends.RECORDS)]
    failures, rank_0 = ends.read(folder)
    assert [end.rank for end in failures] == list(range(ends.RECORDS))
    assert ends.any_failed(folder)
    assert rank_0 is not None
    assert len(list(folder.iterdir())) == ends.RECORDS + 1


@pytest.mark.parametrize("code", [0, 75, 143])
def test_a_rank_that_does_not_fail_leaves_the_end_of_rank_0_only(code: int, folder: Path) -> None:
    assert ends.record(code, "") is None
    assert ends.read(folder) == ([], ends.read(folder)[1])
    assert ends.read(folder)[1].code == code  # type: ignore[union-attr]


def test_nothing_is_written_without_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ends.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert ends.record(1, "x") is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ends.VARIABLE, "/proc/nowhere")
    assert ends.record(1, "x") is None


def test_torn_records_are_left_out(folder: Path) -> None:
    ends.record(1, "ValueError: a", rank=3)
    (folder / "end-1.json").write_text('{"rank": 4, "ho')
    assert [end.rank for end in ends.read(folder)[0]] == [3]


@pytest.mark.parametrize(
    "reason, follows, start, hardware",
    [
        ("RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:3273", True, False, False),
        ("RuntimeError: [unbound_buffer.cc:129] Timed out waiting 54000ms for send operation to complete", True, False, False),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited", True, False, False),
        (
            "DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE",
            False,
            True,
            False,
        ),
        ("DistStoreError: Timed out after 55 seconds waiting for clients. 1/2 clients joined.", False, True, False),
        ("DistStoreError: wait timeout after 60000ms, keys: /default_pg/0//cpu//0/rank_0", True, False, False),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", False, False, True),
        ("ValueError: batch", False, False, False),
    ],
)
def test_kinds_of_failures(reason: str, follows: bool, start: bool, hardware: bool, folder: Path) -> None:
    ends.record(1, reason)
    (end,), _ = ends.read(folder)
    assert (end.follows, end.start, end.hardware) == (follows, start, hardware)


def test_a_rank_that_does_nothing_is_not_a_failure_of_the_program(folder: Path) -> None:
    for number, text in enumerate(("its process does not respond: suspended or dead", "all ranks wait in the same phase")):
        ends.record(1, f"no progress for 9 s in phase 'start': {text}")
        assert ends.read(folder)[0][number].may_pass is (number == 0)


FAIL = """
import sys
from pipeline.common import ends
def inner(): raise ValueError(sys.argv[1])
try:
    inner()
except ValueError as error:
    ends.report(error)
"""


def test_only_the_first_rank_prints_its_traceback(folder: Path) -> None:
    def fail(rank: str) -> str:
        variables = {"SLURM_PROCID": rank, "SLURMD_NODENAME": f"n{rank}"}
        return subprocess.run(
            [sys.executable, "-c", FAIL, f"of {rank}"], env=os.environ | variables, stderr=subprocess.PIPE, text=True
        ).stderr

    first, second = fail("5"), fail("2")
    assert "Traceback" in first
    assert "ValueError: of 5" in first
    assert len(second.splitlines()) == 1
    assert "on n2 ends after another one: ValueError: of 2" in second
    assert [end.host for end in ends.read(folder)[0]] == ["n5", "n2"]


def test_torchrun_ends_with_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table of failures is the last that it prints; the file is that which its own error handler writes."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        compose.exit_with_error(UserError.of("training.steps", 0, "must be at least 1", "set it"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    lines = ChildFailedError("pipeline", {0: failure}).format_msg().splitlines()
    assert [line.strip() for line in lines[-4:-1]] == ["traceback : 1 problem:", "- training.steps=0: must be at least 1", "fix: set it"]


def test_a_rank_tells_the_supervisor_of_sigterm(folder: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signals.record_end(ends.note_told)
    try:
        assert not ends.was_told(folder)
        signal.raise_signal(signal.SIGTERM)
        assert ends.was_told(folder)
    finally:
        signals.received.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
