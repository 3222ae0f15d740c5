"""How runs end: by a signal, by a suspended rank, by gradients that are not finite; and two jobs on one run directory."""

import json
import signal
import time
from pathlib import Path

import pytest

from pipeline.common import ends
from tests.helpers import pipeline, start_ranks
from tests.training.test_pretrain import TINY, exact, lines, run

pytestmark = pytest.mark.world


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while not (run_dir / "metrics.jsonl").is_file() or len(lines(run_dir)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def arguments(tokens: Path, run_dir: Path, *more: str) -> tuple[str, ...]:
    return ("stage=pretrain", *TINY, "precision=fp32", "parallel.zero_stage=0", f"data.tokens={tokens}", f"run_dir={run_dir}", *more)


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


def test_a_signal_at_one_rank_writes_a_checkpoint_and_the_run_continues_bit_for_bit(tokens, tmp_path, started):
    steps = ("training.steps=40", "checkpoint.every=0")
    stopped = arguments(tokens, tmp_path / "stopped", *steps)
    for number, (ranks, name, code) in enumerate([(2, signal.SIGTERM, 143), (1, signal.SIGUSR1, 75)]):
        with open(tmp_path / "log", "wb") as output:
            processes = started(ranks, *stopped, output=output.fileno())
            wait_for_step(tmp_path / "stopped", 3 + 12 * number)
            processes[-1].send_signal(name)
            assert [process.wait(300) for process in processes] == [code] * ranks
        assert "the same command continues" in (tmp_path / "log").read_text()
        assert not (tmp_path / "stopped" / "manifest.json").exists()
    run(1, *stopped[len(TINY) + 1 :])
    run(1, *arguments(tokens, tmp_path / "straight", *steps)[len(TINY) + 1 :])
    for ours, theirs in zip(exact(tmp_path / "stopped"), exact(tmp_path / "straight"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_checkpoints_by_time(tokens, tmp_path):
    pipeline(
        *arguments(tokens, tmp_path / "run", "training.steps=6", "checkpoint.every=0", "checkpoint.every_minutes=1e-9", "checkpoint.keep=9")
    )
    steps = [path.name[-1] for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))]
    assert steps == ["2", "4", "6"], "decided after step s, written after step s + 1, and once for each decision"


@pytest.mark.parametrize("suspended", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_suspended_rank_is_named_with_its_stacks(tokens, tmp_path, started, suspended):
    with open(tmp_path / "log", "wb") as output:
        steps = ("training.steps=100000", "training.timeout_minutes=0.05")
        processes = started(2, *arguments(tokens, tmp_path / "run", *steps), output=output.fileno())
        wait_for_step(tmp_path / "run", 3)
        processes[suspended].send_signal(signal.SIGSTOP)
        assert processes[1 - suspended].wait(300) == 1
    log = (tmp_path / "log").read_text()
    assert f"the run waits for rank {suspended} (host " in log
    assert "suspended or dead" in log
    assert "in train" in log, "the stacks show the training loop"


@pytest.mark.long
def test_a_rank_that_stops_answering_ends_the_run_before_the_timeout(tokens, tmp_path, started, monkeypatch):
    """As of a node without power, whose connections stay open; training.timeout_minutes has its default."""
    (tmp_path / "ends").mkdir()
    monkeypatch.setenv(ends.VARIABLE, str(tmp_path / "ends"))
    processes = started(2, *arguments(tokens, tmp_path / "run", "training.steps=100000"))
    wait_for_step(tmp_path / "run", 3)
    processes[1].send_signal(signal.SIGSTOP)
    assert processes[0].wait(300) == 1
    (end,), _ = ends.read(tmp_path / "ends")
    assert end.rank == 1, "the rank to blame, recorded by the one that found it"
    assert "suspended or dead" in end.reason


@pytest.mark.parametrize("suspended", [pytest.param((0, 1), id="all ranks"), pytest.param((1,), id="one rank", marks=pytest.mark.long)])
def test_a_suspended_and_continued_run_goes_on(tokens, tmp_path, started, suspended):
    """All ranks for longer than the timeout, as by scontrol suspend; one rank for less than it."""
    with open(tmp_path / "log", "wb") as output:
        steps = ("training.steps=100000", "training.timeout_minutes=0.08")
        processes = started(2, *arguments(tokens, tmp_path / "run", *steps), output=output.fileno())
        wait_for_step(tmp_path / "run", 3)
        for rank in suspended:
            processes[rank].send_signal(signal.SIGSTOP)
        time.sleep(8 if len(suspended) == 2 else 3)
        for rank in suspended:
            processes[rank].send_signal(signal.SIGCONT)
        wait_for_step(tmp_path / "run", len(lines(tmp_path / "run")) + 20)
        time.sleep(2)
        wait_for_step(tmp_path / "run", len(lines(tmp_path / "run")) + 20)
        processes[1].send_signal(signal.SIGUSR1)
        assert [process.wait(300) for process in processes] == [75, 75]
    assert "no progress" not in (tmp_path / "log").read_text()


def test_a_second_job_is_refused_and_a_killed_one_does_not_block(tokens, tmp_path, started):
    first = started(1, *arguments(tokens, tmp_path / "run", "training.steps=100000"))
    wait_for_step(tmp_path / "run", 2)
    said = pipeline(*arguments(tokens, tmp_path / "run", "training.steps=5"), expect=2)
    assert "is being written by another job" in said
    assert str(first[0].pid) in said
    first[0].send_signal(signal.SIGKILL)
    first[0].wait(300)
    (tmp_path / "run" / "checkpoints" / ".step-00000009.partial").mkdir(parents=True)
    pipeline(*arguments(tokens, tmp_path / "run", "training.steps=5"))
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
    assert reason in pipeline(*arguments(tokens, tmp_path / "run", *settings), expect=2)
    assert not (tmp_path / "run" / "manifest.json").exists()
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} <= {"catalog.json"}
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("ranks, replaced", [(1, False), (2, True)])
def test_a_run_whose_directory_is_removed_ends_with_one_message(tokens, tmp_path, started, ranks, replaced):
    """The directory is not created again, and that of another run in its place is left alone."""
    with open(tmp_path / "log", "wb") as output:
        steps = ("training.steps=100000", "checkpoint.every=0", "checkpoint.every_minutes=0.02")
        processes = started(ranks, *arguments(tokens, tmp_path / "run", *steps), output=output.fileno())
        wait_for_step(tmp_path / "run", 2)
        (tmp_path / "run").rename(tmp_path / "moved")
        if replaced:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "metrics.jsonl").touch()
        assert [process.wait(300) for process in processes] == [2] * ranks
    log = (tmp_path / "log").read_text()
    assert f"run_dir={tmp_path / 'run'}: was removed or renamed while the run was writing to it" in log
    assert "Traceback" not in log
    assert not (tmp_path / "run").exists() or [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_files_of_a_run(tokens, tmp_path):
    """Modes are those of other new files; a missing manifest is written by the next start; a damaged checkpoint can be set aside."""
    common = arguments(tokens, tmp_path / "run", "checkpoint.every=2", "checkpoint.keep=9")
    pipeline(*common, "training.steps=4")
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    (tmp_path / "new").touch()
    usual = (tmp_path / "new").stat().st_mode
    assert {path.stat().st_mode for path in newest.iterdir()} == {usual}

    (tmp_path / "run" / "manifest.json").unlink()
    pipeline(*common, "training.steps=4")
    totals = json.loads((tmp_path / "run" / "manifest.json").read_text())["totals"]
    assert totals["loss"] == [line["loss"] for line in lines(tmp_path / "run") if "loss" in line][-1]

    index = newest / "index.json"
    index.write_text(index.read_text().replace('"step": 4', '"step": 3'))
    assert "does not match its checksum" in pipeline(*common, "training.steps=5", expect=2)
    said = pipeline(*common, "training.steps=5", "checkpoint.skip_damaged=true")
    assert "step 2, 32 samples" in said
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"catalog.json", "step-00000002", "step-00000004", "step-00000004.damaged", "step-00000005"}
