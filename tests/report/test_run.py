"""The reader of a run directory: its numbers and states, what real runs write, damaged files, and files of older versions."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.common import events as record
from pipeline.common import metrics_file
from pipeline.common.ranks import Ranks
from pipeline.report import answers, comparison, history, page, run, run_files, table
from pipeline.report.run import State
from pipeline.training import run_events
from tests.helpers import pipeline
from tests.report.builder import BEGIN, events, restarted, steps, validation, write
from tests.training.test_blend import TINY


def test_the_time_of_steps_that_are_made_again(tmp_path: Path) -> None:
    lines = steps(1, 8, 2.0)
    for line in lines[4:6]:
        line["save_seconds"] = 5.0
    write(tmp_path, lines)
    assert [metrics_file.seconds_after(tmp_path, step) for step in (5, 8)] == [3 * 2.0 + 5.0, 0.0]


def test_a_run_with_a_lost_node(tmp_path: Path) -> None:
    found = history.read(restarted(tmp_path / "run"))
    one = found.run
    assert (one.state, one.step, one.steps, one.job, one.restarts, one.nodes) == (State.FINISHED, 100, 100, "7", 1, 2)
    assert one.error == "b lost: RuntimeError: peer (a)"
    assert [(start.step, start.layout, start.cause) for start in one.starts] == [
        (0, "data 4", ""),
        (40, "tensor 2 x data 2", "b lost: RuntimeError: peer"),
    ]
    assert one.node_hours == pytest.approx(780 / 3600)
    assert one.problems == ()
    spent = {kind.kind: (round(3600 * kind.node_hours), kind.lost) for kind in found.spent}
    assert spent == {
        "training": (2 * (40 + 60), False),
        "b lost: RuntimeError: peer": (2 * 40, True),  # 100 s without 20 s of start-up and 40 s of steps that count
        "start-up": (2 * (20 + 15 + 2), True),  # the other ranks end 2 s after rank 0
        "unknown": (2 * 23, False),
        "waiting": (780 - 2 * 100 - 2 * 100, True),
    }
    assert [(corpus.corpus, corpus.samples, corpus.epochs) for corpus in found.seen] == [("books", 200, 2.0), ("web", 600, 0.6)]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40), st.integers(0, 60), st.booleans()), min_size=1, max_size=6))
def test_node_hours_are_spent_on_something(tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, int, int, bool]]) -> None:
    """Starts with seconds, steps, seconds of start-up, failed or not: the kinds sum to the node-hours of the jobs, none is negative."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    at, step = 0.0, 0
    write(run_dir, steps(1, sum(count for _, count, _, _ in lives), seconds=0.5))
    events(run_dir, (0, "job_start", {"nodes": ["a", "b", "c"]}))
    for seconds, count, starting, failed in lives:
        events(run_dir, (at, "ranks_start", {"nodes": ["a", "b"], "step": step}), (at + starting, "run_start", {"step": step}))
        at, step = at + seconds + starting, step + count
        events(run_dir, (at, "ranks_end", {"code": int(failed), "failed": failed, "step": step, "reason": "x" * failed}))
    events(run_dir, (at + 3, "action", {"action": "end", "code": 0}))
    found = history.read(run_dir)
    assert found.run.node_hours == pytest.approx(3 * (at + 3) / 3600)
    assert sum(one.node_hours for one in found.spent) == pytest.approx(found.run.node_hours)
    assert all(one.node_hours >= 0 for one in found.spent)
    assert sum(one.count for one in found.spent if one.kind == "training") == len(lives)


JOB = (0, "job_start", {"nodes": ["a"]})
RANKS = (1, "ranks_start", {"nodes": ["a"], "step": -1, "layout": ""})


@pytest.mark.parametrize(
    "lines, age, state, reason",
    [
        ([JOB, RANKS], 5, State.RUNNING, "last written 5 s ago"),
        ([JOB, RANKS], 3000, State.SILENT, "wrote nothing for 50 min, and no end is recorded"),
        (
            [JOB, RANKS, (9, "ranks_end", {"code": 75}), (9, "action", {"action": "requeue", "reason": "the time limit"})],
            1e6,
            State.QUEUED,
            None,
        ),
        ([JOB, RANKS, (9, "ranks_end", {"code": 143}), (9, "action", {"action": "end", "code": 143})], 1e6, State.STOPPED, None),
        ([JOB, RANKS, (9, "ranks_end", {"code": 0}), (9, "action", {"action": "end", "code": 0})], 1e6, State.STOPPED, None),
        ([JOB, RANKS, (9, "ranks_end", {"code": 1}), (9, "action", {"action": "end", "code": 1, "reason": "no"})], 9, State.FAILED, "no"),
        ([(0, "run_start", {"step": 0}), (9, "run_end", {"code": 2, "reason": "lr=-1"})], 9, State.FAILED, "lr=-1"),
        ([(0, "run_start", {"step": 0}), (9, "run_end", {"code": 75, "reason": "signal"})], 9, State.STOPPED, "signal"),
        ([(0, "run_start", {"step": 0})], 9, State.RUNNING, None),
        ([], 9, State.RUNNING, None),
        ([], 1e6, State.SILENT, None),
        (
            [JOB, RANKS, (9, "ranks_end", {"code": 75}), (9, "action", {"action": "requeue", "reason": "a node", "exclude": ["n2"]})],
            1e6,
            State.QUEUED,
            "a node; not on n2",
        ),
        (
            [JOB, RANKS, (9, "run_end", {"code": 143, "reason": "asked to stop by a signal"})],
            400,
            State.SILENT,
            "the ranks have ended (asked to stop by a signal), and what follows is not recorded: squeue tells whether job 7 waits",
        ),
        (
            [JOB, RANKS, (9, "ranks_end", {"code": 143}), (9, "requeue_asked", {"reason": "preempted"})],
            400,
            State.SILENT,
            "Slurm was asked to put job 7 back into the queue (preempted), and no answer is recorded: squeue tells whether job 7 waits",
        ),
        (
            [JOB, RANKS, (9, "ranks_end", {"code": 143}), (9, "action", {"action": "requeued", "reason": "Slurm"})],
            99,
            State.QUEUED,
            "Slurm",
        ),
        ([JOB, (2, "something_new", {"of": "a later version"}), RANKS], 9, State.RUNNING, None),
    ],
)
def test_states(tmp_path: Path, lines: list, age: float, state: State, reason: str | None) -> None:
    write(tmp_path, steps(1, 30))
    os.utime(tmp_path / "metrics.jsonl", (BEGIN + 8, BEGIN + 8))
    job = "7" if ("job_start" in {name for _, name, _ in lines}) else None
    if lines:
        events(tmp_path, *lines, job=job)
    found = run.read(tmp_path, now=max(BEGIN + 8, BEGIN + (lines[-1][0] if lines else 0)) + age)
    assert found.state is state
    assert reason is None or found.reason == reason


def test_a_start_without_a_step_is_not_running(tmp_path: Path) -> None:
    write(tmp_path, steps(1, 30))
    os.utime(tmp_path / "metrics.jsonl", (BEGIN, BEGIN))
    events(tmp_path, JOB, RANKS, (9, "ranks_end", {"code": 1, "failed": True}), (9, "action", {"action": "restart"}))
    events(tmp_path, (10, "ranks_start", {"nodes": ["a"], "step": 30}))
    assert run.read(tmp_path, now=BEGIN + 12).state is State.STARTING


def test_a_loss_that_is_not_finite_is_seen_everywhere(tmp_path: Path) -> None:
    """18 of the last 20 steps; the last validation was before them. The other run is worse, and the best that counts."""
    lost = [line | {"loss": math.nan} for line in steps(41, 58)]
    write(tmp_path / "0", [*steps(1, 40), validation(40, 3.0), *lost, *steps(59, 60)])
    write(tmp_path / "1", [*steps(1, 60), validation(60, 3.5)], lr=2e-3)
    for name in "01":
        events(tmp_path / name, JOB, RANKS, (2, "run_start", {"step": 0}))
    said = "no finite loss in 18 of the last 20 steps"
    found = [history.read(tmp_path / name) for name in "01"]
    assert [one.run.trouble for one in found] == [said, ""]
    shown = {answer.question: answer for answer in answers.answers(found[0])}
    assert (shown["Is the loss healthy?"].text, shown["Is the loss healthy?"].level) == (said, "bad")
    text = page.of_run(found[0])
    assert f"; {said}</b>" in text
    assert 'class="verdict warning"' in text
    assert any(said in line for line in answers.lines_now(found[0].run, 100))
    assert [cell for cell in table.cells_of(found[0].run) if said in cell]
    assert table.values_of(found[0].run)["loss"] is None
    best = comparison.verdict(page.compared(found))
    assert best == "run 1 has the lowest validation loss (3.5000); no other run has one; not counted, without a finite loss: 0"
    last = write(tmp_path / "2", [*steps(1, 60), validation(40, 3.0), validation(60, math.nan)])
    assert not run_files.is_finite(run.read(last).validation_loss), "an older validation is not that of this run"


@pytest.mark.parametrize("lines, said", [(45, "ends at step 45"), (0, "is missing, or has no step")])
def test_a_finished_run_without_all_of_its_metrics(tmp_path: Path, lines: int, said: str) -> None:
    write(tmp_path, steps(1, lines), done=100)
    found = run.read(tmp_path)
    assert (found.state, found.step) == (State.FINISHED, 100)
    assert f"metrics.jsonl {said}, and the run at step 100" in found.problems


def test_a_finished_run_with_a_damaged_manifest(tmp_path: Path) -> None:
    write(tmp_path, steps(1, 100), done=100)
    events(tmp_path, (0, "run_start", {"step": 0}), (100, "run_end", {"code": 0, "step": 100}), job=None)
    (tmp_path / "manifest.json").write_text("{")
    found = run.read(tmp_path)
    assert (found.state, found.reason) == (State.FINISHED, "100 steps")
    assert "manifest.json is damaged, or no stage wrote it" in found.problems


def test_a_killed_start_lasted_until_it_wrote_last(tmp_path: Path) -> None:
    """Outside of Slurm, and in a job that ended without a record: 60 steps of 1 s, of which the checkpoint had 40."""
    write(tmp_path, steps(1, 100), done=100)
    events(tmp_path, (0, "run_start", {"nodes": ["a"], "step": 0}), job=None)
    again = {"nodes": ["a"], "step": 40, "last_written": BEGIN + 60, "changed": [["optimizer.lr", 0.001, 0.002]]}
    events(tmp_path, (100, "run_start", again), (160, "run_end", {"code": 0, "step": 100}), job=None)
    found = history.read(tmp_path)
    assert [(start.begin - BEGIN, (start.end or 0) - BEGIN) for start in found.run.starts] == [(0, 60), (100, 160)]
    assert found.run.node_hours == pytest.approx(120 / 3600)
    assert found.lost == pytest.approx(20 / 3600)
    assert "optimizer.lr: 0.001 -> 0.002" in answers.restart(found.run)
    (tmp_path / "events.jsonl").unlink()
    events(tmp_path, (0, "job_start", {"nodes": ["a"]}), (0, "ranks_start", {"nodes": ["a"]}), (0, "run_start", {"step": 0}), job="7")
    events(tmp_path, (90, "job_start", {"nodes": ["a"]}), (100, "ranks_start", {"nodes": ["a"]}), (100, "run_start", again), job="8")
    events(tmp_path, (160, "ranks_end", {"code": 0, "step": 100}), (160, "action", {"action": "end", "code": 0}), job="8")
    assert [((job.end or 0) - job.begin) for job in run.read(tmp_path).life.jobs] == [60, 70]


@pytest.mark.parametrize("by_chain", [False, True])
def test_a_lost_job_lasted_until_slurm_gave_its_nodes_back(tmp_path: Path, by_chain: bool) -> None:
    """The node of its supervisor was lost at 100 s, and Slurm noticed it at 400 s: its accounting has 400 s of two nodes, and 50 s more."""
    write(tmp_path, steps(1, 10))
    events(tmp_path, (5, "job_start", {"nodes": ["a", "b"], "started": BEGIN}), (6, "ranks_start", {"nodes": ["a", "b"]}))
    events(tmp_path, (100, "chain", {"next": "8"}), (101, "limit", {"limit": BEGIN + 9000}))
    job = "8" if by_chain else "7"
    events(tmp_path, (460, "job_start", {"nodes": ["a", "c"], "started": BEGIN + 450, "queued": BEGIN + 400}), job=job)
    events(tmp_path, (500, "action", {"action": "end", "code": 0}), job=job)
    found = run.read(tmp_path, now=BEGIN + 600)
    assert found.node_hours == pytest.approx(2 * (400 + 50) / 3600)
    assert not [problem for problem in found.problems if "node-hours are counted up" in problem]
    assert found.life.jobs[0].limit == BEGIN + 9000


def test_the_time_that_is_left_and_the_limit_of_the_job(tmp_path: Path) -> None:
    write(tmp_path, steps(1, 40, seconds=2.0))
    events(tmp_path, (0, "job_start", {"nodes": ["a"], "limit": BEGIN + 60}), RANKS)
    found = run.read(tmp_path, now=time.time())
    assert (found.seconds_left, found.limit, found.tokens_per_second) == (pytest.approx(60 * 2.0), BEGIN + 60, 64)
    assert found.loss == pytest.approx(sum(line["loss"] for line in steps(21, 40)) / 20)


def test_damaged_files_are_named_and_left_out(tmp_path: Path) -> None:
    restarted(tmp_path)
    whole = run.read(tmp_path)
    text = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*text[:50], b"\x00\x00\xff\n", *text[50:], b'{"step": 101, "los']))
    (tmp_path / "config.yaml").write_text("training: [1, 2\nstage")
    (tmp_path / "manifest.json").write_text("{")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    (tmp_path / "events.jsonl").write_text("\n".join([*lines[:3], lines[3][:30], '{"event": 5}', *lines[4:]]) + "\n")
    found = history.read(tmp_path).run
    assert (found.step, found.loss, found.validation_loss) == (100, whole.loss, whole.validation_loss)
    said = "\n".join(found.problems)
    assert "config.yaml is missing or damaged: the number of steps is not known" in said
    assert "manifest.json is damaged" in said
    assert "events.jsonl: 2 lines are damaged; the last one is line 7 from the end" in said
    assert "metrics.jsonl: 2 lines are damaged; the last one is line 1 from the end" in said
    assert "config.yaml is damaged: while parsing" in said
    assert [start.end for start in found.starts] == [BEGIN + 180, BEGIN + 290], "the action tells of the end whose own line is damaged"


def test_a_line_that_is_being_written(tmp_path: Path) -> None:
    write(tmp_path, steps(1, 30))
    with open(tmp_path / "metrics.jsonl", "a") as handle:
        handle.write('{"step": 31, "loss"')
    found = run.read(tmp_path)
    assert found.step == 30
    assert "metrics.jsonl: the last line is incomplete" in found.problems


def test_only_the_end_of_a_large_file_is_read_and_the_numbers_are_the_same(tmp_path: Path) -> None:
    lines = steps(1, 30_000)
    lines[25_000:25_000] = [validation(25_000, 3.5)]
    write(tmp_path, lines, total=50_000)
    assert (tmp_path / "metrics.jsonl").stat().st_size > history.run_files.MOST_BYTES
    short, long = run.read(tmp_path, now=BEGIN), history.read(tmp_path, now=BEGIN).run
    assert (short.step, short.validation_loss, short.validation_step) == (30_000, 3.5, 25_000)
    assert not [problem for problem in short.problems if "damaged" in problem], "the line at which reading begins is cut, not damaged"
    assert {**vars(short), "problems": ()} == {**vars(long), "problems": ()}


def test_versions_that_wrote_no_events_and_a_run_continued_by_a_newer_one(tmp_path: Path) -> None:
    write(tmp_path, steps(1, 60))
    old = history.read(tmp_path)
    assert (old.run.node_hours, old.run.restarts, old.spent, old.seen) == (None, 0, (), ())
    assert "events.jsonl has no start of this run: starts, reasons and node-hours are not known" in old.run.problems
    events(tmp_path, (0, "run_start", {"nodes": ["a"], "step": 50, "ranks": 1, "corpora": {"": 100}}), job=None)
    events(tmp_path, (20, "run_end", {"step": 60, "code": 143, "reason": "asked to stop by a signal"}), job=None)
    new = history.read(tmp_path)
    assert new.run.node_hours == pytest.approx(20 / 3600)
    trained = {kind.kind: 3600 * kind.node_hours for kind in new.spent}
    assert trained["training"] == pytest.approx(10), "the steps before the first recorded start are no part of its time"
    assert (new.seen[0].samples, new.seen[0].epochs) == (480, 4.8)


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "config.yaml", "manifest.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    restarted(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert f"{name} cannot be read: Is a directory" in history.read(tmp_path).run.problems


def test_a_folder_without_files(tmp_path: Path) -> None:
    found = history.read(tmp_path / "none").run
    assert (found.state, found.step, found.steps) == (State.SILENT, 0, None)


@pytest.mark.parametrize(
    "losses, rises, spikes, missing",
    [
        ([3 + 2 / n + 0.01 * (n % 7) for n in range(1, 801)], False, 0, 0),
        ([3 + 0.002 * n + 0.01 * (n % 7) for n in range(1, 801)], True, 0, 0),
        ([9.0 if n == 700 else 3 - 0.001 * n + 0.01 * (n % 7) for n in range(1, 801)], False, 1, 0),
        ([None if n == 700 else 3 - 0.001 * n + 0.01 * (n % 7) for n in range(1, 801)], False, 0, 1),
        ([25.0 if n in (70, 71) else 5.6 - 0.001 * n + 0.01 * (n % 7) for n in range(1, 91)], False, 2, 0),
    ],
    ids=["falls", "rises", "spike", "not finite", "short"],
)
def test_health_of_the_loss(losses: list[float | None], rises: bool, spikes: int, missing: int) -> None:
    found = history.health([{"step": n, "loss": loss} for n, loss in enumerate(losses, start=1)])
    assert found is not None
    assert (found.last - found.before > 2 * found.error, len(found.spikes), found.not_finite) == (rises, spikes, missing)
    assert found.spikes in ((), (700,), (70, 71))


def test_a_loss_above_that_of_the_first_steps_is_not_healthy(tmp_path: Path) -> None:
    """It has jumped, and falls again: neither rising nor a spike of single steps."""
    write(tmp_path, [line | {"loss": line["loss"] if line["step"] < 40 else 700.0 - line["step"]} for line in steps(1, 100)], done=100)
    found = answers.loss(*(lambda one: (one.run, one.health))(history.read(tmp_path)))
    assert "falling" in found.text
    assert re.search(r"above the \d\.\d{4} of its first 25 steps", found.text)
    assert found.level == "bad"


def test_what_training_records(tokens: Path, tmp_path: Path) -> None:
    """A run of four steps that is continued to eight: real files of this version."""
    settings = (*TINY, f"data.tokens={tokens}", f"run_dir={tmp_path}/run", "training.validation_batches=1", "checkpoint.every=2")
    for count in (4, 8):
        pipeline(*settings, f"training.steps={count}", f"optimizer.gradient_clipping={count}")
    found = history.read(tmp_path / "run")
    assert (found.run.state, found.run.step, found.run.restarts, found.run.problems) == (State.FINISHED, 8, 1, ())
    assert [(start.step, start.end_step, start.code, start.layout) for start in found.run.starts] == [
        (0, 4, 0, "data 1, ZeRO 0, micro-batches of 2"),
        (4, 8, 0, "data 1, ZeRO 0, micro-batches of 2"),
    ]
    assert found.run.starts[1].changed == ("optimizer.gradient_clipping: 4.0 -> 8.0", "training.steps: 4 -> 8")
    assert all(start.version.startswith("0.") for start in found.run.starts)
    assert sum(one.samples for one in found.seen) == 8 * 16
    assert 0 < found.spent[0].node_hours <= (found.run.node_hours or 0)
    diverging = (*settings, f"run_dir={tmp_path}/diverging", "training.steps=8", "model.init_std=1e30")
    pipeline(*diverging, expect=2)
    failed = run.read(tmp_path / "diverging")
    assert (failed.state, failed.skipped) == (State.FAILED, 5)
    assert failed.error is not None
    assert "5 steps in a row were skipped" in failed.error


def test_ranks_that_wait_for_each_other_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is there, with its node; then all nodes are known, and it is the same start. Later starts are recorded when they train."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    run_dir = tmp_path / "run"
    for number in (1, 0, 0):
        run_events.announce(run_dir, Ranks(number, 2))
        assert run_dir.exists() == (number == 0)
    found = run.read(run_dir)
    assert (found.state, found.nodes, len(found.starts)) == (State.STARTING, 1, 1)
    record.record(run_dir, "run_start", nodes=["a", "b"], step=0, layout="data 2")
    found = run.read(run_dir)
    assert (found.state, found.nodes, len(found.starts)) == (State.STARTING, 2, 1)
    record.record(run_dir, "run_end", step=-1, code=143, reason="asked to stop by a signal")
    record.record(run_dir, "run_start", nodes=["a"], step=0, layout="")
    assert [start.end is None for start in run.read(run_dir).starts] == [False, True]
    run_events.announce(tmp_path / "alone", Ranks(0, 1))
    assert not (tmp_path / "alone").exists(), "one rank waits for nobody"
