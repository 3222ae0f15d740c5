"""A file system that fails while a run reads its token shards: for a moment, or for good."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.common import ends, events
from pipeline.data.load import retries
from pipeline.data.load.retries import Retries, UnreadableFile
from tests.helpers import start_ranks
from tests.training import one_rank

STEPS = ("training.steps=6", "checkpoint.every=3", "data.prefetch=2")


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, calls: Callable[[int], bool]) -> Iterator[list[str]]:
    """Calls of `os.open` for a training shard, or of `os.pread`, that fail with an error; yields the failed ones.

    Args:
        name: of the function.
        number: of the error.
        calls: which calls fail, by their number from 0.
    """
    real, failed, made, lock = getattr(os, name), [], [], threading.Lock()

    def wrapped(file: object, *arguments: object) -> object:
        if (name == "open" and "/train-" not in str(file)) or arguments[0] == 1:  # events.py reads single bytes
            return real(file, *arguments)
        with lock:
            made.append(str(file))
            fails = calls(len(made) - 1)
            failed.extend([str(file)] * fails)
        if fails:
            raise OSError(number, os.strerror(number))
        return real(file, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, wrapped)
        yield failed


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in one_rank.lines(run_dir).values()]


@pytest.fixture(scope="module")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run whose reads all succeed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    one_rank.run("pretrain", folder, f"data.tokens={tokens}", *STEPS)
    return losses(folder)


FAULTS = {
    "off": [("pread", errno.EIO, lambda call: 10 <= call < 24), ("open", errno.ENOENT, lambda call: call < 3)],
    "lazy": [("pread", errno.ESTALE, lambda call: call % 7 == 3), ("open", errno.EACCES, lambda call: call % 2 == 0)],
}
CASES = [(verify, *fault) for verify, faults in FAULTS.items() for fault in faults]
CASES += [
    pytest.param(verify, *fault, marks=pytest.mark.long) for verify, other in (("off", "lazy"), ("lazy", "off")) for fault in FAULTS[other]
]


@pytest.mark.parametrize("verify, name, number, calls", CASES)
def test_a_run_goes_on_with_the_same_samples(
    tokens: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[float],
    verify: str,
    name: str,
    number: int,
    calls: Callable[[int], bool],
) -> None:
    monkeypatch.setattr(retries, "WAITS", (0.001,) * 30)
    with failing(monkeypatch, name, number, calls) as failed:
        one_rank.run("pretrain", tmp_path, f"data.tokens={tokens}", *STEPS, f"data.verify='{verify}'")
    assert failed, "no fault has landed"
    assert losses(tmp_path) == undisturbed


def test_a_shard_that_vanishes_and_comes_back(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[float]
) -> None:
    """As on a mount that is lost: the handle that is open is stale, and the file is gone."""
    folder = Path(shutil.copytree(tokens, tmp_path / "tokens"))
    shards, away = sorted(folder.glob("train-*.tar")), tmp_path / "away"
    away.mkdir()

    def move(source: Path, target: Path) -> None:
        for shard in shards:
            (source / shard.name).rename(target / shard.name)

    def back() -> None:
        move(away, folder)

    timer, moved = threading.Timer(1.0, back), threading.Event()

    def fails(call: int) -> bool:
        if call == 5 and not moved.is_set():
            move(folder, away)
            moved.set()
            timer.start()
        return moved.is_set() and timer.is_alive()

    with failing(monkeypatch, "pread", errno.ESTALE, fails) as failed:
        one_rank.run("pretrain", tmp_path / "run", f"data.tokens={folder}", *STEPS)
    assert failed, "no fault has landed"
    assert losses(tmp_path / "run") == undisturbed


def test_a_run_ends_with_the_first_failure(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "WAITS", (0.01, 0.02))
    with failing(monkeypatch, "pread", errno.EIO, lambda call: call >= 16), pytest.raises(UnreadableFile) as ended:
        one_rank.run("pretrain", tmp_path, f"data.tokens={tokens}", *STEPS)
    first, fix = str(ended.value).splitlines()
    assert first.startswith(f"data.tokens={tokens}/train-")
    assert "cannot be read: Input/output error (tried for 0 s) for samples 16 to 19" in first, "of the fifth batch of four samples"
    assert "the same command" in fix
    assert events.read(tmp_path)[-1]["reason"] == first
    names = [record.getMessage().partition(":")[0] for record in caplog.records if "trying again" in record.getMessage()]
    assert len(names) == len(set(names)) > 0, "each file is logged once"


def test_threads_give_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "WAITS", (0.3,))
    reads, found = Retries(), []
    began = threading.Barrier(2)

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read_first() -> None:
        began.wait(30)
        with pytest.raises(UnreadableFile) as ended:
            reads.read(Path("first"), fail)
        found.append(ended.value)

    thread = threading.Thread(target=read_first)
    thread.start()
    began.wait(30)
    thread.join(30)
    monkeypatch.setattr(retries, "WAITS", (1000.0,))
    with pytest.raises(UnreadableFile, match="second"):
        reads.read(Path("second"), fail)
    assert "first" in str(found[0])
    assert reads.read(Path("third"), lambda: 3) == 3


#: The package on a rank whose reads of shards fail after a while, and that waits shortly.
FAULTY = """
import errno, itertools, os, runpy
from pipeline.data.load import retries
retries.WAITS = (0.01, 0.02)
calls, read = itertools.count(), os.pread
def faulty(file, size, start):
    if os.environ["RANK"] == "1" and size > 1 and next(calls) >= 16:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return read(file, size, start)
os.pread = faulty
runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
"""


@pytest.mark.world
def test_all_ranks_end_and_one_says_why(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends").mkdir()
    monkeypatch.setenv(ends.VARIABLE, str(tmp_path / "ends"))
    settings = (*one_rank.TINY, "training.steps=100000", "checkpoint.every=0", "training.micro_batch_size=2", "data.prefetch=2")
    words = (*settings, f"data.tokens={tokens}", f"run_dir={tmp_path / 'run'}")
    with open(tmp_path / "log", "wb") as output:
        ranks = start_ranks(2, *words, output=output.fileno(), program=("-c", FAULTY))
        try:
            assert [rank.wait(100) for rank in ranks] == [1, 1]
        finally:
            for rank in ranks:
                rank.kill()
    log = (tmp_path / "log").read_text()
    failures, _ = ends.read(tmp_path / "ends")
    (first,) = [end for end in failures if not end.follows]
    assert first.rank == 1
    assert "cannot be read: Stale file handle (tried for 0 s) for samples " in first.reason
    assert not first.final, "another start may succeed"
    assert log.count("Stale file handle (tried for") == 1
    assert "Traceback" not in log
