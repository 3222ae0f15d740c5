"""A sweeper that searches, Optuna's: it gets the validation loss of each run, here and from Slurm jobs that are waited for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from pipeline.common.errors import RunFailed, UserError
from pipeline.launch import hydra_sweeper, submission
from pipeline.launch.submission import QueuedJob
from pipeline.launch.sweep_manifest import SweepEntry, SweepManifest
from pipeline.launch.sweep_submission import SweepRun
from pipeline.launch.sweep_table import Point
from tests.helpers import pipeline
from tests.launch.test_sweep_table import write_run
from tests.training.one_rank import TINY

SETTINGS = tuple(word for word in TINY if not word.startswith("optimizer.lr="))
OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=5", "hydra.sweeper.n_jobs=2", "hydra.sweeper.sampler.seed=1")
SEARCH = ("-m", "stage=pretrain", *SETTINGS, *OPTUNA)


@pytest.mark.long
def test_optuna_finds_the_lowest_validation_loss(tokens: Path, tmp_path: Path) -> None:
    words = (*SEARCH, f"data.tokens={tokens}", "training.steps=2", "training.validate_every=2")
    pipeline(*words, "optimizer.lr=choice(0.0001,0.001,0.01)", f"run_dir={tmp_path}/sweep")
    table = json.loads((tmp_path / "sweep" / "table.json").read_text())
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert 2 <= len(table) <= 3, "a point that is chosen again is not trained again"
    assert best["best_value"] == table[0]["validation_loss"]
    assert table[0]["values"] == ["optimizer.lr=0.01"] == [f"optimizer.lr={best['best_params']['optimizer.lr']}"]


@pytest.mark.long
def test_a_point_that_is_illegal_ends_the_search(tokens: Path, tmp_path: Path) -> None:
    words = (*SEARCH, f"data.tokens={tokens}", "training.steps=2", "training.validate_every=2")
    printed = pipeline(*words, "optimizer.lr=choice(0.0001,0.01,-1)", f"run_dir={tmp_path}/bad", expect=2)
    assert "optimizer.lr=-1" in printed


def sweeper(name: str, **settings: Any) -> Any:
    """A composed configuration."""
    return OmegaConf.create({"hydra": {"sweeper": {"_target_": name}}, "dry_run": {"enabled": False} | settings})


def test_several_ranks_and_dry_runs_cannot_search() -> None:
    basic, optuna = (
        "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
        "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
    )
    assert not list(hydra_sweeper.search_violations(sweeper(basic, enabled=True), 8))
    assert not list(hydra_sweeper.search_violations(sweeper(optuna), 1))
    assert [v.key for v in hydra_sweeper.search_violations(sweeper(optuna, enabled=True), 2)] == ["hydra/sweeper", "dry_run.enabled"]


def test_a_search_of_jobs_must_wait_for_them(tmp_path: Path) -> None:
    slurm = ("hydra/launcher=slurm", "cluster=devcluster", "training.steps=2", f"run_dir={tmp_path}", "training.global_batch_size=32")
    message = pipeline(*SEARCH, "optimizer.lr=choice(0.0001,0.01)", *slurm, expect=2)
    assert "hydra.launcher.wait=False" in message


def test_the_result_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "0", [5.0, 4.0, 3.0], {2: 2.5, 3: 3.5})
    found = hydra_sweeper.result(Point(tmp_path / "0", (), 3), ("a=1",), per_byte=False)
    assert (found.status, found.return_value, found.overrides) == (JobStatus.COMPLETED, 3.5, ("a=1",))
    write_run(tmp_path / "1", [5.0], {1: 2.5}, finished=False)
    write_run(tmp_path / "2", [5.0], {})
    for number, steps, why in ((1, 3, "step 1 of 3"), (2, 1, "set training.validate_every"), (3, 1, "not started")):
        found = hydra_sweeper.result(Point(tmp_path / str(number), (), steps), (), per_byte=False)
        assert found.status is JobStatus.FAILED
        with pytest.raises(RunFailed, match=why):
            _ = found.return_value


def test_jobs_are_waited_for_also_those_with_which_a_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = str(tmp_path / "0")
    config: Any = SimpleNamespace(stage=SimpleNamespace(name="pretrain"))
    point = SweepRun(SweepEntry("x", 0, run_dir, ()), config, ())
    manifest = SweepManifest(tmp_path, {"x": SweepEntry("x", 0, run_dir, (), job=7)})
    first = [QueuedJob(7, "a", "/", "python"), QueuedJob(8, "b", "/", "python")]
    following = [QueuedJob(9, "c", "/", f"slurm/pretrain.sbatch run_dir={run_dir}")]
    answers: list[Any] = [first, UserError.of("slurm", "squeue", "failed", "try again"), following, first[1:]]
    monkeypatch.setattr(submission, "queue", lambda: answer if isinstance(answer := answers.pop(0), list) else _raise(answer))
    slept: list[float] = []
    hydra_sweeper.wait_for([point], manifest, slept.append)
    assert (answers, slept) == ([], [1.0, 2.0, 4.0])


def _raise(error: Exception) -> Any:
    raise error
