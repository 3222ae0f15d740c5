"""The evaluation jobs that a training run submits, with commands of Slurm that record what they get."""

import os
import threading
from pathlib import Path

import pytest

from pipeline.checkpoint import native
from pipeline.common.errors import UserError
from pipeline.config import command_line, compose
from pipeline.config.rules import evaluation
from pipeline.evaluation import record
from pipeline.launch import job
from pipeline.launch.evaluation_jobs import Schedule, Submissions
from tests.helpers import ROOT, one_in
from tests.world import configured

SBATCH = """#!/bin/bash
[ -e {folder}/down ] && {{ echo "slurm is down" >&2; exit 1; }}
[ -z "${{SLURM_JOB_ID:-}}" ] && cat > {folder}/job-$((1 + $(ls {folder} | grep -c job-))) && echo 7
"""
TASKS = ("evaluation.tasks=[numbers]", "evaluation.task_folder=my tasks", "evaluation.few_shot=2")


def schedule(folder: Path, *overrides: str) -> Schedule:
    """The schedule of a run with these settings, evaluated every 10 of 25 steps, in a job of the account fir."""
    for name, text in {"sbatch": SBATCH.format(folder=folder), "squeue": f"#!/bin/bash\ncat {folder}/queue\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "queue").touch()
    given = [
        f"run_dir={folder}/run",
        "evaluation.every=10",
        "training.steps=25",
        "optimizer.warmup_steps=5",
        "checkpoint.keep=1",
        *overrides,
    ]
    compose.register()
    found, composed = compose.diagnose(command_line.parse(["stage=pretrain", *given]))
    assert not found
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "3", "SLURM_JOB_ACCOUNT": "fir"}
    return Schedule(compose.to_run_config(composed), given, environment)


def add_checkpoint(run_dir: Path, step: int) -> Path:
    folder = native.folder_of(run_dir, step)
    folder.mkdir(parents=True)
    (folder / native.INDEX).touch()
    return folder


def test_a_checkpoint_is_submitted_and_kept_until_it_is_evaluated(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(ROOT)
    run, jobs = tmp_path / "run", schedule(tmp_path, *TASKS, "parallel.tensor=2", 'evaluation.overrides=["parallel.tensor=1"]')
    assert [step for step in range(30) if jobs.is_due(step)] == [10, 20, 25]
    paths = {step: add_checkpoint(run, step) for step in (10, 15)}
    assert [jobs.waits(path) for path in paths.values()] == [True, False]
    jobs.submit()
    texts = [path.read_text() for path in sorted(tmp_path.glob("job-*"))]
    assert [text.partition("stage.every=10")[2].split() for text in texts] == [
        ["\\", f"run_dir={run}"],
        [
            "\\",
            "'stage.tasks=[numbers]'",
            "\\",
            """'stage.task_folder='"'"'my""",
            """tasks'"'"''""",
            "\\",
            "stage.few_shot=2",
            "\\",
            f"run_dir={run}",
        ],
    ]
    for text in texts:
        assert {"#SBATCH --dependency=singleton", "#SBATCH --account=fir", "exec bash slurm/evaluate.sbatch \\"} <= set(text.splitlines())
        assert "checkpoint.keep" not in text
        assert text.index("parallel.tensor=2") < text.index("parallel.tensor=1")
    # A job that has not started will evaluate the next checkpoint, too.
    (tmp_path / "queue").write_text("8\n")
    paths[20] = add_checkpoint(run, 20)
    jobs.submit()
    assert len(list(tmp_path.glob("job-*"))) == 2
    # Slurm does not answer: nothing is lost.
    (tmp_path / "queue").write_text("")
    (tmp_path / "down").touch()
    jobs.submit()
    assert "slurm is down" in caplog.text
    record.write(run, 10, "validation", {}, {})
    assert jobs.waits(paths[10])
    record.write(run, 10, "tasks", {}, {})
    assert [jobs.waits(paths[step]) for step in (10, 20)] == [False, True]


def test_training_does_not_wait_for_a_slow_sbatch(caplog):
    """While one submission hangs, requests return, and one further submission follows, which covers all of them."""
    begun, answers, calls = threading.Event(), threading.Event(), []

    def submit() -> None:
        calls.append(len(calls))
        begun.set()
        answers.wait()

    submissions = Submissions(submit)
    submissions.request()
    begun.wait()
    for _ in range(5):
        submissions.request()
    submissions.wait(0.01)
    assert "may not be submitted" in caplog.text
    answers.set()
    submissions.wait()
    assert calls == [0, 1]
    submissions.request()
    submissions.wait()
    assert calls == [0, 1, 2]


@pytest.mark.parametrize(
    "wrong, message",
    one_in(
        3,
        [
            ("evaluation.nodes=3", "training.global_batch_size=64: must be a multiple of 3 data ranks"),
            ('evaluation.overrides=["parallel.tensro=1"]', "parallel.tensro=1: no such key"),
            ("evaluation.time=soon", "cluster.time=soon: must have the form"),
        ],
    ),
)
def test_jobs_that_would_fail_are_refused_before_training(wrong, message, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=message):
        schedule(tmp_path, wrong)


def test_jobs_of_a_fine_tuning_run_evaluate_its_held_out_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    more = ("stage=finetune", "training.objective=dpo", "lora.rank=4", "training.context_factor=2", "data.instructions.train=[a.jsonl]")
    (missing,) = evaluation.violations(configured(*more, "evaluation.every=10"))
    assert str(missing).startswith("evaluation.validation=True: requires data.instructions.validation")
    held_out = "data.instructions.validation=[held-out.jsonl]"
    assert not list(evaluation.violations(configured(*more, "evaluation.every=10", held_out)))
    jobs = schedule(tmp_path, *more, held_out)
    add_checkpoint(tmp_path / "run", 10)
    jobs.submit()
    (text,) = [path.read_text() for path in tmp_path.glob("job-*")]
    assert held_out in text
    assert "training.objective=dpo" in text
    assert "context_factor" not in text, "the checkpoints have the longer context"


def test_jobs_read_the_files_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nmodel: {hidden: 64}\n")
    jobs = schedule(tmp_path, f"--config-dir={tmp_path}", "experiment=mine")
    add_checkpoint(tmp_path / "run", 10)
    jobs.submit()
    (text,) = [path.read_text() for path in tmp_path.glob("job-*")]
    assert f"--config-dir={tmp_path}" in text
    assert "experiment=mine" in text


def test_a_submitted_job_does_not_inherit_ranks():
    given = {"SLURM_CONF": "a", "SLURM_NTASKS": "4", "SLURMD_NODENAME": "n1", "RANK": "1", "RANKS": "x", "PMI_FD": "5", "HOME": "/root"}
    assert job.outside(given) == {"SLURM_CONF": "a", "RANKS": "x", "HOME": "/root"}


def test_averaged_weights_are_evaluated_once(tmp_path):
    average = 'evaluation.overrides=["stage.weights=ema"]'
    jobs, path = schedule(tmp_path, average, "training.ema=0.9"), add_checkpoint(tmp_path / "run", 10)
    record.write(tmp_path / "run", 10, "validation", {"": {"validation_loss": 1.0}}, {})
    assert jobs.waits(path)
    record.write(tmp_path / "run", 10, "validation", {"": {"validation_loss": 1.0}}, {"stage.weights": "ema"})
    assert not jobs.waits(path)
    refused = list(evaluation.violations(configured("stage=pretrain", average, "evaluation.every=10")))
    assert [str(violation).partition("\n")[0] for violation in refused] == [
        "evaluation.overrides=['stage.weights=ema']: evaluate averaged weights, and training.ema is not set"
    ]
