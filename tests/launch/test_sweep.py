"""Sweeps without a Slurm cluster: validation of all runs, run directories, job texts. Submitted jobs: test_slurm_jobs.py."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config.cluster import ClusterConfig
from pipeline.config.command_line import quoted
from pipeline.launch import job, moldable, sweep_manifest, sweep_table
from pipeline.training import finetuning
from tests.helpers import RAW, pipeline
from tests.report import builder
from tests.training.one_rank import TINY, lines, newest, run
from tests.world import configured

SLURM = ("hydra/launcher=slurm", "cluster=devcluster")


@pytest.mark.parametrize("launcher", [(), pytest.param(SLURM, marks=pytest.mark.long)], ids=["basic", "slurm"])
def test_all_runs_are_validated_before_the_first_starts(launcher: tuple[str, ...], corpus: Path, tmp_path: Path) -> None:
    message = pipeline(
        "-m", "stage=shard", f"data.input=[{corpus}]", f"data.shards={tmp_path / 'shards'}", f"run_dir={tmp_path / 'sweep'}",
        "data.shard_megabytes=1,-2,-3", "data.seed=0,-4", *launcher, expect=2,
    )  # fmt: skip
    assert message.startswith("3 problems")
    for violation in ("data.shard_megabytes=-2.0", "data.shard_megabytes=-3.0", "data.seed=-4"):
        assert message.count(violation) == 1
    assert "Traceback" not in message
    assert not (tmp_path / "shards").exists()
    assert not (tmp_path / "sweep").exists()


@pytest.mark.long
def test_values_that_do_not_compose_are_reported_separately(tmp_path: Path) -> None:
    message = pipeline("-m", "optimizer.lr=1e-4,abc", "model=llama-tiny,lama-tiny", f"run_dir={tmp_path}", *SLURM, expect=2)
    assert message.startswith("2 problems")
    assert "optimizer.lr=abc" in message
    assert "model=lama-tiny" in message


def test_runs_are_executed_sequentially(corpus: Path, tmp_path: Path) -> None:
    printed = pipeline(
        "-m", "stage=shard", *RAW, f"data.input=[{corpus}]", "data.seed=1,2",
        "data.shards=${run_dir}/shards", f"run_dir={tmp_path / 'sweep'}",
    )  # fmt: skip
    manifests = [json.loads((tmp_path / "sweep" / run / "shards" / "manifest.json").read_text()) for run in "01"]
    assert [m["settings"]["data.seed"] for m in manifests] == [1, 2]
    assert f"sweep, 2 of 2: data.seed=2 ({tmp_path}/sweep/1)" in printed
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (tmp_path / "sweep/table.md").read_text().splitlines()]
    assert table[0] == ["data.seed", "state", "run_dir"]
    assert table[2:] == [["1", "finished", f"{tmp_path}/sweep/0"], ["2", "finished", f"{tmp_path}/sweep/1"]]


def test_a_fine_tuning_job_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    words = (
        "stage=finetune",
        "model=llama3.2-1b",
        "training.sequence_length=2048",
        "training.micro_batch_size=8",
        "cluster.hardware=v100-16",
    )
    config = configured(*words, "run_dir=none", "data.instructions.train=[unread.jsonl]")
    assert moldable.memory_violation(config, 1) is None  # an earlier job of a chain may write its checkpoint
    assert "none: whether it fits in memory is not checked: checkpoint.initialize_from=None: is required" in caplog.text
    monkeypatch.setattr(finetuning, "complete", lambda config, _: config)
    refused = moldable.memory_violation(config, 1)
    assert refused is not None
    assert "the planned job does not fit" in refused.rule


def test_a_dry_run_prints_the_jobs_and_a_value_that_is_listed_twice_is_one_point(tmp_path: Path) -> None:
    words = ("-m", "stage=pretrain", f"run_dir={tmp_path}/sweep", "dry_run=true", *SLURM)
    text = pipeline(*words, "optimizer.lr=1e-3,2e-3", "training.seed=1,1")
    assert "2 points of the sweep have the settings of others" in text
    assert [line for line in text.splitlines() if line.startswith("#SBATCH --output=")] == [
        f"#SBATCH --output={tmp_path}/sweep/{number}/slurm-%j.out" for number in (0, 1)
    ]
    assert text.count("#!/bin/bash") == 2
    assert f"run_dir={tmp_path}/sweep/1" in text
    assert not (tmp_path / "sweep").exists(), "nothing is written"
    assert "dry_run=" not in text, "the printed jobs are those that would be submitted"
    assert "training.seed=range(0,0): gives no point" in pipeline(*words, "training.seed=range(0,0)", expect=2)


def test_what_the_site_requires_is_asked_for_before_the_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterConfig(name="site", required=["account", "qos"])
    assert [violation.key for violation in job.not_given(cluster)] == ["cluster.account", "cluster.qos"]
    monkeypatch.setenv("SBATCH_ACCOUNT", "project")
    assert [violation.key for violation in job.not_given(replace(cluster, sbatch=["--qos=short"]))] == []
    monkeypatch.delenv("SBATCH_ACCOUNT")
    words = ("-m", "stage=pretrain", "optimizer.lr=1e-3,2e-3", f"run_dir={tmp_path}/sweep", *SLURM, "cluster.required=[account]")
    assert pipeline(*words, expect=2).count("cluster.account=None: is not set, and cluster=devcluster requires it") == 1
    assert not (tmp_path / "sweep").exists()


def test_a_local_sweep_says_the_same_of_its_points_everywhere(tokens: Path, tmp_path: Path) -> None:
    """One point fails before it has written a file, and the settings are those of a folder of the user."""
    (tmp_path / "own/experiment").mkdir(parents=True)
    (tmp_path / "own/experiment/short.yaml").write_text("# @package _global_\ntraining: {steps: 2, validate_every: 1}\n")
    words = ("-m", "stage=pretrain", f"--config-dir={tmp_path}/own", "experiment=short", *TINY, f"data.tokens={tokens},{tmp_path}")
    printed = pipeline(*words, f"run_dir={tmp_path}/sweep", expect=2)
    manifest = sweep_manifest.read(tmp_path / "sweep")
    assert manifest.config_dirs == (f"{tmp_path}/own",)
    points = sweep_table.read_states(manifest)
    assert [point.state for point in points] == ["finished", "failed"]
    assert f"failed: {points[1].reason}" in printed
    assert [row["state"] for row in json.loads((tmp_path / "sweep/table.json").read_text())] == ["finished", f"failed: {points[1].reason}"]
    assert sweep_manifest.not_begun(tmp_path / "sweep") == [f"point 1 of sweep.json failed: {points[1].reason}"]
    pipeline(*words[:-1], f"data.tokens={tokens}", f"run_dir={tmp_path}/sweep")
    assert len(json.loads((tmp_path / "sweep/table.json").read_text())) == 2, "also the point that this command does not have"
    moved = (tmp_path / "sweep").rename(tmp_path / "moved")
    assert [point.state for point in sweep_table.read_states(sweep_manifest.read(moved))] == ["finished", "failed"]
    again = replace(manifest.sorted()[1], overrides=("++data.seed=1",))
    assert again.values == ("data.seed=1",)
    assert manifest.with_job(manifest.sorted()[1].id, 7, "log").sorted()[1].outcome == ""


def test_points_by_what_slurm_says_and_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point 0 is in the queue; 1 was killed with its supervisor; 2 has ended without a file of a run. A copy has no jobs."""
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '5|RUNNING|None'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    manifest = sweep_manifest.SweepManifest(tmp_path / "sweep", {})
    for number in range(3):
        values, run_dir = (f"training.seed={number}",), tmp_path / "sweep" / str(number)
        point = sweep_manifest.point_id(values)
        manifest = manifest.with_point(sweep_manifest.SweepEntry(point, number, str(run_dir), values))
        manifest = manifest.with_job(point, 5 + number, str(run_dir / f"slurm-{number}.out"))
        run_dir.mkdir(parents=True)
        (run_dir / f"slurm-{number}.out").touch()
    manifest.write()
    builder.write(tmp_path / "sweep/1", builder.steps(1, 3))
    begun = time.time() - builder.BEGIN
    builder.events(tmp_path / "sweep/1", (begun, "job_start", {"nodes": ["a"]}), (begun, "ranks_start", {"nodes": ["a"]}), job="6")
    states = [(point.state, point.reason) for point in sweep_table.read_states(sweep_manifest.read(tmp_path / "sweep"))]
    assert states[0] == ("running", "")
    assert states[1] == ("failed", "job 6 ended without a record: killed, or its first node was lost")
    assert states[2] == ("ended", f"see {tmp_path}/sweep/2/slurm-2.out")
    builder.events(tmp_path / "sweep/1", (time.time() - builder.BEGIN, "run_start", {"nodes": ["a"], "step": 0}), job=None)
    again = sweep_table.read_states(sweep_manifest.read(tmp_path / "sweep"))[1]
    assert again.state == "starting", "somebody continues it outside of Slurm"
    shutil.copytree(tmp_path / "sweep", tmp_path / "copy")
    copied = sweep_manifest.read(tmp_path / "copy")
    assert [(entry.run_dir, entry.job) for entry in copied.sorted()] == [(f"{tmp_path}/copy/{number}", None) for number in range(3)]
    assert sweep_table.cancel(copied) == [], "the jobs are those of the original"
    text = (tmp_path / "sweep/sweep.json").read_text()
    (tmp_path / "sweep/sweep.json").write_text(text.replace('"number": 2', '"number": 1'))
    with pytest.raises(UserError, match="two points have one number"):
        sweep_manifest.read(tmp_path / "sweep")


def test_the_dry_run_of_a_local_sweep_names_the_run_directory_of_each_point(tmp_path: Path) -> None:
    text = pipeline("-m", "stage=pretrain", "model=llama-tiny", "training.seed=1,2", f"run_dir={tmp_path}/sweep", "dry_run=true")
    assert re.findall(r"sbatch .*run_dir=(\S+)", text) == [f"{tmp_path}/sweep/0", f"{tmp_path}/sweep/1"]
    assert not (tmp_path / "sweep").exists()


def test_all_submission_errors_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps([{"run_dir": f"{tmp_path}/same", "overrides": ["optimizer.lr=1.0"]}]))
    words = ["-m", "stage=pretrain", f"run_dir={tmp_path}", "cluster.time=soon", "hydra.sweeper.max_batch_size=2", *SLURM]
    message = pipeline(*words, "hydra.launcher.at_once=0", expect=2)
    assert message.startswith("3 problems")
    for text in ("hydra.launcher.at_once=0: must be at least 1", "cluster.time=soon", "hydra.sweeper.max_batch_size=2"):
        assert text in message
    message = pipeline(*words, "optimizer.lr=1e-4,3e-4", "hydra.sweep.subdir=same", expect=2)
    assert "is that of another point" in message
    assert "is shared by several runs" in message


def test_a_folder_with_runs_of_no_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "metrics.jsonl").write_text('{"step": 1}\n')
    message = pipeline("-m", "stage=pretrain", "optimizer.lr=1e-4,1e-3", f"run_dir={tmp_path}", expect=2)
    assert f"run_dir={tmp_path}/1: has a run that is not of this sweep" in message


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path) -> None:
    one = sweep_manifest.SweepEntry(sweep_manifest.point_id(["optimizer.lr=1e-3"]), 3, f"{tmp_path}/3", ("optimizer.lr=1e-3",), job=7)
    sweep_manifest.SweepManifest(tmp_path, {one.id: one}).write()
    assert sweep_manifest.read(tmp_path).sorted() == [one]
    path = tmp_path / "sweep.json"
    path.write_text(path.read_text().replace("1e-3", "2e-3"))
    with pytest.raises(UserError, match=f"point 3=optimizer.lr=2e-3: has the id {one.id}, which is that of other settings"):
        sweep_manifest.read(tmp_path)
    path.write_text(path.read_text()[:50])
    words = ["-m", "stage=pretrain", "optimizer.lr=1e-4", f"run_dir={tmp_path}", *SLURM]
    assert "has a sweep.json that cannot be read" in pipeline(*words, expect=2)


KEYS = st.sampled_from(["optimizer.lr", "model.layers", "data.seed", "cluster.nodes"])


@given(
    lists=st.lists(
        st.dictionaries(KEYS, st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=1), min_size=1, max_size=4
    )
)
def test_points_keep_their_numbers_however_they_are_listed(lists: list[dict[str, list[int]]]) -> None:
    """A sweep extended along any list, with the lists in any order; its points have different numbers without a gap."""
    manifest = sweep_manifest.SweepManifest(Path("sweep"), {})
    known: dict[str, int] = {}
    for values in lists:
        points = [[f"{key}={value}" for key, value in zip(values, chosen, strict=True)] for chosen in itertools.product(*values.values())]
        for settings_, options in sweep_manifest.split([["stage=pretrain", *point, "run_dir=sweep"] for point in points]):
            point = sweep_manifest.point_id(settings_)
            number = manifest.number(point)
            assert known.setdefault(point, number) == number
            manifest = manifest.with_point(sweep_manifest.SweepEntry(point, number, f"sweep/{number}", settings_, options))
    assert sorted(known.values()) == list(range(len(known)))


@settings(deadline=None)
@given(st.text("ab/.=, '\"\\$[]{}%#~é", min_size=1))
def test_quoted_run_dir_is_parsed_back(folder: str) -> None:
    assert str(OverridesParser.create().parse_override(f"run_dir={quoted(folder)}").value()) == folder


@pytest.mark.long
def test_cooldowns_of_one_trunk_are_a_sweep(tokens: Path, tmp_path: Path) -> None:
    """Decays of different lengths that end at the same step, from checkpoints of a trunk at a constant rate: here, and as Slurm jobs."""
    run("pretrain", tmp_path / "trunk", f"data.tokens={tokens}", "training.steps=4", "optimizer.schedule=constant")
    fork = f'checkpoint.fork="{tmp_path}/trunk/step-${{add:${{training.steps}},-${{optimizer.decay_steps}}}}"'
    branches = (*TINY, f"data.tokens={tokens}", "optimizer.schedule=wsd", "optimizer.decay_steps=1,2,3", "training.steps=4", fork)
    pipeline("-m", "stage=pretrain", *branches, f"run_dir={tmp_path}/cooldowns")
    table = json.loads((tmp_path / "cooldowns" / "table.json").read_text())
    assert {row["state"] for row in table} == {"finished"}
    for number in (0, 1, 2):
        parent = newest(tmp_path / "cooldowns" / str(number)).parent
        assert parent is not None
        assert (parent["how"], parent["step"]) == ("fork", 3 - number)
        assert list(lines(tmp_path / "cooldowns" / str(number))) == list(range(4 - number, 5))
    message = pipeline("-m", "stage=pretrain", *branches[:-1], f"checkpoint.fork={tmp_path}/trunk/step-3,{tmp_path}/trunk/step-9",
                       f"run_dir={tmp_path}/none", expect=2)  # fmt: skip
    assert f"checkpoint.fork={tmp_path}/trunk/step-9" in message
    assert not list((tmp_path / "none").glob("*/*")), "no point was trained before the mistake was found"
    jobs = pipeline(
        "-m", "stage=pretrain", *branches, f"run_dir={tmp_path}/jobs", "dry_run=true", *SLURM, "cluster.nodes=1", "cluster.tasks_per_node=1"
    )
    assert jobs.count("#!/bin/bash") == 3
    assert jobs.count(fork) == 3
