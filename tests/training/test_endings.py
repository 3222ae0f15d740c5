"""How runs end: by a signal, by a suspended rank, by gradients that are not finite; and two jobs on one run directory."""

import contextlib
import json
import logging
import os
import pty
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from pipeline.checkpoint import native
from pipeline.common import ends, events
from pipeline.common.errors import UserError
from pipeline.training.checkpoint_hooks import CheckpointHooks
from tests.helpers import pipeline, start_ranks
from tests.training import one_rank
from tests.training.test_pretrain import TINY, exact, lines, run

pytestmark = pytest.mark.world


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while not (run_dir / "metrics.jsonl").is_file() or len(lines(run_dir)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def arguments(tokens: Path, run_dir: Path, *more: str) -> tuple[str, ...]:
    return ("stage=pretrain", *TINY, "precision=fp32", "parallel.zero_stage=0", f"data.tokens={tokens}", f"run_dir={run_dir}", *more)


def after(module: str, statement: str) -> tuple[str, str]:
    """What runs the package after a statement about a name of a module, such as an assignment."""
    return "-c", f'import runpy, {module}\n{module}.{statement}\nrunpy.run_module("pipeline", run_name="__main__", alter_sys=True)'


@pytest.fixture
def started():
    """Starts ranks that are killed after the test."""
    processes = []

    def start(*command, **options):
        processes.extend(found := start_ranks(*command, **options))
        return found

    yield start
    for process in processes:
        process.kill()


def test_a_signal_writes_a_checkpoint_and_the_run_continues_bit_for_bit(tokens, tmp_path, started):
    """At one rank, or the interrupt of all ranks; one that arrives twice within a second counts once."""
    steps = ("checkpoint.every=0", "optimizer.schedule=constant")  # the last step is only known at the end
    stopped = arguments(tokens, tmp_path / "stopped", *steps, "training.steps=100000")
    kinds = [(2, signal.SIGINT, 130), (2, signal.SIGTERM, 143), (1, signal.SIGUSR1, 75)]
    before = 0
    for ranks, name, code in kinds:
        with open(tmp_path / "log", "wb") as output:
            processes = started(ranks, *stopped, output=output.fileno())
            wait_for_step(tmp_path / "stopped", before + 3)
            for process in (*processes, *processes) if name == signal.SIGINT else processes[-1:]:
                process.send_signal(name)
            assert [process.wait(300) for process in processes] == [code] * ranks
        log = (tmp_path / "log").read_text()
        assert "the same command continues" in log
        assert log.count("interrupted: the run writes a checkpoint and stops") == (name == signal.SIGINT)
        assert not (tmp_path / "stopped" / "manifest.json").exists()
        assert native.step_of(native.complete(tmp_path / "stopped")[-1]) == lines(tmp_path / "stopped")[-1]["step"]
        before = len(lines(tmp_path / "stopped"))
    assert [event["code"] for event in events.read(tmp_path / "stopped") if event["event"] == "run_end"] == [130, 143, 75]
    last = f"training.steps={lines(tmp_path / 'stopped')[-1]['step'] + 5}"
    for name in ("stopped", "straight"):
        run(1, *arguments(tokens, tmp_path / name, *steps, last)[len(TINY) + 1 :])
    for ours, theirs in zip(exact(tmp_path / "stopped"), exact(tmp_path / "straight"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_second_interrupt_ends_a_run_at_once(tokens, tmp_path, started):
    """Of a run whose disk is so slow that the checkpoint takes for ever."""
    with open(tmp_path / "log", "wb") as output:
        settings = ("training.steps=100000", "checkpoint.async_save=auto")
        impatient = after("pipeline.checkpoint.writer_process", "_END = 0.5")
        (process,) = started(1, *arguments(tokens, tmp_path / "run", *settings), output=output.fileno(), program=impatient)
        wait_for_step(tmp_path / "run", 3)
        (writer,) = (int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        os.kill(writer, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        os.kill(writer, signal.SIGCONT)
    assert "interrupted; run the same command again to continue" in (tmp_path / "log").read_text()


def test_a_run_whose_terminal_is_closed_writes_a_checkpoint(tokens, tmp_path, started):
    """The progress bar can then not be drawn."""
    ours, theirs = pty.openpty()
    command = arguments(tokens, tmp_path / "run", "training.steps=100000")
    (process,) = started(1, *command, output=theirs, program=after("signal", "signal(signal.SIGHUP, signal.SIG_DFL)"))
    os.close(theirs)
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    wait_for_step(tmp_path / "run", 3)
    os.close(ours)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGHUP)
    assert process.wait(300) == 143
    assert native.step_of(native.complete(tmp_path / "run")[-1]) == lines(tmp_path / "run")[-1]["step"]


def _drain(terminal: int) -> None:
    """Read what a terminal gets, until it is closed."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


def test_checkpoints_by_time(tokens, tmp_path):
    settings = ("training.steps=6", "checkpoint.every=0", "checkpoint.every_minutes=1e-9", "checkpoint.keep=9")
    one_rank.run("pretrain", tmp_path, f"data.tokens={tokens}", *settings)
    steps = [path.name[-1] for path in sorted((tmp_path / "checkpoints").glob("step-*"))]
    assert steps == ["2", "4", "6"], "decided after step s, written after step s + 1, and once for each decision"


@pytest.mark.long
def test_a_rank_that_stops_answering_ends_the_run_before_the_timeout(tokens, tmp_path, started, monkeypatch):
    """As of a node without power, whose connections stay open; training.timeout_minutes has its default."""
    (tmp_path / "ends").mkdir()
    monkeypatch.setenv(ends.VARIABLE, str(tmp_path / "ends"))
    processes = started(2, *arguments(tokens, tmp_path / "run", "training.steps=100000"))
    wait_for_step(tmp_path / "run", 3)
    processes[1].send_signal(signal.SIGSTOP)
    assert processes[0].wait(300) == 1
    end, *_ = ends.read(tmp_path / "ends")[0]  # the rank that waits may record, after it, that its peer is gone
    assert end.rank == 1, "the rank to blame, recorded by the one that found it"
    assert "suspended or dead" in end.reason
    assert end.may_pass


@pytest.mark.long
@pytest.mark.parametrize("suspended, named", [pytest.param((0, 1), 0, id="all"), pytest.param((1,), 1, id="one")])
def test_suspended_ranks_go_on_and_one_that_stays_suspended_is_named(tokens, tmp_path, started, suspended, named):
    """All ranks for longer than the timeout, as by scontrol suspend; one rank for less than it, and then for good."""
    with open(tmp_path / "log", "wb") as output:
        steps = ("training.steps=100000", "training.timeout_minutes=0.08")
        processes = started(2, *arguments(tokens, tmp_path / "run", *steps), output=output.fileno())
        wait_for_step(tmp_path / "run", 3)
        for rank in suspended:
            processes[rank].send_signal(signal.SIGSTOP)
        time.sleep(6.5 if len(suspended) == 2 else 3)
        for rank in suspended:
            processes[rank].send_signal(signal.SIGCONT)
        wait_for_step(tmp_path / "run", len(lines(tmp_path / "run")) + 20)
        time.sleep(2)
        wait_for_step(tmp_path / "run", len(lines(tmp_path / "run")) + 20)
        assert "no progress" not in (tmp_path / "log").read_text()
        processes[named].send_signal(signal.SIGSTOP)
        assert processes[1 - named].wait(300) == 1
    log = (tmp_path / "log").read_text()
    assert f"the run waits for rank {named} (host " in log
    assert "suspended or dead" in log
    assert "in train" in log, "the stacks show the training loop"


def test_a_second_job_is_refused_and_a_killed_one_does_not_block(tokens, tmp_path, started):
    first = started(1, *arguments(tokens, tmp_path / "run", "training.steps=100000"))
    wait_for_step(tmp_path / "run", 2)
    settings = (f"data.tokens={tokens}", "training.steps=5", "checkpoint.every=0")
    with pytest.raises(UserError, match=f"is being written by another job.*{first[0].pid}"):
        one_rank.run("pretrain", tmp_path / "run", *settings)
    first[0].send_signal(signal.SIGKILL)
    first[0].wait(300)
    (tmp_path / "run" / "checkpoints" / ".step-00000009.partial").mkdir(parents=True)
    one_rank.run("pretrain", tmp_path / "run", *settings)
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"catalog.json", "step-00000005"}, (
        "leftovers are removed"
    )


@pytest.mark.parametrize(
    "settings, reason",
    [
        (("model.init_std=1e30", "training.steps=8"), "5 steps in a row were skipped"),
        (
            ("optimizer.weight_decay=3e38", "optimizer.lr=10", "optimizer.min_lr_ratio=1", "optimizer.warmup_steps=0", "training.steps=1"),
            "not finite; no checkpoint",
        ),
    ],
)
def test_a_run_that_diverges_fails_and_saves_nothing(tokens, tmp_path, settings, reason):
    with pytest.raises(UserError, match=reason):
        one_rank.run("pretrain", tmp_path / "run", f"data.tokens={tokens}", "checkpoint.every=0", *settings)
    assert not (tmp_path / "run" / "manifest.json").exists()
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} <= {"catalog.json"}
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_run_whose_directory_is_removed_ends_with_one_message(tokens, tmp_path, started):
    """That of another run in its place is left alone."""
    with open(tmp_path / "log", "wb") as output:
        steps = ("training.steps=100000", "checkpoint.every=0", "checkpoint.every_minutes=0.02")
        program = after("pipeline.common.ranks", "GRACE_SECONDS = 1.0")
        processes = started(2, *arguments(tokens, tmp_path / "run", *steps), output=output.fileno(), program=program)
        wait_for_step(tmp_path / "run", 2)
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").touch()
        assert [process.wait(300) for process in processes] == [2, 2]
    log = (tmp_path / "log").read_text()
    assert f"run_dir={tmp_path / 'run'}: was removed or renamed while the run was writing to it" in log
    assert "Traceback" not in log
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_directory_that_is_removed_is_not_created_again(tokens, tmp_path):
    hooks = CheckpointHooks(writes=lambda step: step == 3 and bool((tmp_path / "run").rename(tmp_path / "moved")))
    with pytest.raises(UserError, match="run: was removed or renamed while the run was writing to it"):
        one_rank.run("pretrain", tmp_path / "run", f"data.tokens={tokens}", "training.steps=9", "checkpoint.every=6", hooks=hooks)
    assert not (tmp_path / "run").exists()


def test_metrics_that_cannot_be_written_for_some_time_are_not_lost(tokens, tmp_path, started):
    """A file-size limit that is set and lifted while the run trains: as of a full disk, it cuts a line, too."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    with open(tmp_path / "log", "wb") as output:
        settings = ("training.steps=100000", "checkpoint.every=0", "checkpoint.every_minutes=0")
        (process,) = started(1, *arguments(tokens, tmp_path / "run", *settings), output=output.fileno())
        wait_for_step(tmp_path / "run", 30)
        limit = metrics.stat().st_size + 1000
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, hard))
        deadline = time.monotonic() + 60
        while b"kept in memory" not in (tmp_path / "log").read_bytes():
            assert time.monotonic() < deadline
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        time.sleep(0.5)
        assert metrics.stat().st_size == limit
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, hard))
        while b"without a gap" not in (tmp_path / "log").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143
    steps = [line["step"] for line in lines(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    log = (tmp_path / "log").read_text()
    assert log.count("kept in memory") == 1
    assert "is written again, without a gap" in log


def test_a_run_that_a_full_disk_ends_says_that_it_continues(tokens, tmp_path, monkeypatch):
    """A file-size limit simulates a full disk, also one that is full only for a checkpoint."""
    monkeypatch.setattr("pipeline.training.saves.LAST_WAITS", (0.0,))
    settings = (f"data.tokens={tokens}", "training.steps=3", "checkpoint.every=0")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for limit, said in ((1 << 10, "run_dir=.*: cannot be written: File too large"), (30 << 10, "could not be written")):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(UserError, match=said) as raised:
                one_rank.run("pretrain", tmp_path / "run", *settings)
            assert limit > 1 << 10 or "training continues from the newest checkpoint" in str(raised.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["catalog.json"]
    one_rank.run("pretrain", tmp_path / "run", *settings)
    assert list(one_rank.lines(tmp_path / "run")) == [1, 2, 3]


def test_files_of_a_run(tokens, tmp_path, caplog):
    """Modes are those of other new files; a missing manifest is written by the next start; a damaged checkpoint can be set aside."""
    common = ("pretrain", tmp_path / "run", f"data.tokens={tokens}", "checkpoint.every=2")
    one_rank.run(*common, "training.steps=4")
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    (tmp_path / "new").touch()
    usual = (tmp_path / "new").stat().st_mode
    assert {path.stat().st_mode for path in newest.iterdir()} == {usual}

    (tmp_path / "run" / "manifest.json").unlink()
    one_rank.run(*common, "training.steps=4")
    totals = json.loads((tmp_path / "run" / "manifest.json").read_text())["totals"]
    assert totals["loss"] == [line["loss"] for line in lines(tmp_path / "run") if "loss" in line][-1]

    index = newest / "index.json"
    index.write_text(index.read_text().replace('"step": 4', '"step": 3'))
    with pytest.raises(UserError, match="does not match its checksum"):
        one_rank.run(*common, "training.steps=5")
    with caplog.at_level(logging.INFO, "pipeline"):
        one_rank.run(*common, "training.steps=5", "checkpoint.skip_damaged=true")
    assert "step 2, 8 samples" in caplog.text
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"catalog.json", "step-00000002", "step-00000004", "step-00000004.damaged", "step-00000005"}


def test_a_run_after_one_with_an_error_in_the_same_process(tokens, tmp_path):
    """As of a sweep on this machine, whose first point diverges."""
    settings = ("stage=pretrain", *TINY, "parallel.zero_stage=0", "precision=fp32", f"data.tokens={tokens}", "training.steps=3")
    points = ("model.init_std=1e30,0.02", "training.max_skipped_steps=1", f"run_dir={tmp_path}/sweep")
    printed = pipeline("-m", *settings, *points, expect=2)
    assert (tmp_path / "sweep" / "table.json").exists(), printed
    rows = json.loads((tmp_path / "sweep" / "table.json").read_text())
    assert sorted(row["state"].partition(":")[0] for row in rows) == ["failed", "finished"], printed
