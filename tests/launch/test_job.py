"""Rendered jobs against golden files, the sbatch command, and invalid cluster options."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from pipeline.common.errors import UserError
from pipeline.config import paths
from pipeline.config.cluster import ClusterConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch import job, rank_step, submission
from tests.helpers import ROOT

GOLDEN = Path(__file__).parent / "golden"


def cluster(name: str) -> ClusterConfig:
    """Load the options of a cluster from conf/cluster/."""
    merged = OmegaConf.merge(OmegaConf.structured(ClusterConfig), OmegaConf.load(ROOT / "conf" / "cluster" / f"{name}.yaml"))
    return OmegaConf.to_object(merged)


PRETRAIN = job.Job(
    name="pretrain-0",
    stage="pretrain",
    overrides=("model=llama-tiny", "parallel.tensor=2", "run_dir=runs/sweep/0"),
    directory=Path("/home/me/tannschen"),
    output="/home/me/tannschen/runs/sweep/0/slurm-%j.out",
)
JOBS = {
    "local": (PRETRAIN, cluster("local")),
    "devcluster": (PRETRAIN, cluster("devcluster")),
    "juwels": (dataclasses.replace(PRETRAIN, stage="tokenize", name="tokenize"), dataclasses.replace(cluster("juwels"), account="fir")),
    "range": (PRETRAIN, dataclasses.replace(cluster("juwels"), nodes=64, min_nodes=8, spares=1, account="fir")),
    "spares": (PRETRAIN, dataclasses.replace(cluster("juwels"), nodes=8, spares=2, account="fir")),
    "awkward": (
        job.Job("a b", "shard", ("data.input=[/data/a b,/c]", "tracking.name='it''s'"), Path('/srv/my "runs" #1'), "/srv/x y/slurm-%j.out"),
        ClusterConfig(qos="long", memory="480G", sbatch=["--comment=two words", "--exclusive", "-C gpu"]),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_job_text(name: str) -> None:
    assert job.render(*JOBS[name]) == (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")


def test_sbatch_line() -> None:
    overrides = ["stage=pretrain", "model=gpt3-175b", "dry_run.enabled=true", "dry_run.rank=517", "parallel.tensor=8", "run_dir=my runs"]
    line = job.sbatch_line(cluster("juwels"), "pretrain", 1024, overrides)
    assert line == (
        "sbatch --nodes=256 --ntasks-per-node=4 --partition=booster --cpus-per-task=12 --gpus-per-node=4 --time=24:00:00 "
        "slurm/pretrain.sbatch model=gpt3-175b parallel.tensor=8 'run_dir=my runs'"
    )


@given(world_size=st.integers(1, 20000), per_node=st.integers(1, 16))
def test_sbatch_line_starts_the_requested_number_of_ranks(world_size: int, per_node: int) -> None:
    words = shlex.split(job.sbatch_line(ClusterConfig(tasks_per_node=per_node), "pretrain", world_size, []))
    options = dict(word[2:].split("=") for word in words if word.startswith("--"))
    room = int(options["nodes"]) * int(options["ntasks-per-node"])
    assert int(options.get("ntasks", room)) == world_size
    assert room - int(options["ntasks-per-node"]) < world_size <= room


def test_every_script_returns_the_exit_code_of_its_stage() -> None:
    for script in set((ROOT / "slurm").glob("*.sbatch")) - {ROOT / "slurm/preflight.sbatch"}:  # one process, which starts its own steps
        assert script.read_text().splitlines()[-1] == f'run_stage stage={script.stem} "$@"'


def test_scripts_and_submitted_jobs_are_signaled_at_the_same_time() -> None:
    for stage in TRAINING_STAGES:
        assert f"#SBATCH --signal=USR1@{job.SIGNAL_SECONDS}\n" in (ROOT / f"slurm/{stage}.sbatch").read_text(encoding="utf-8")


def test_violations_are_reported_together() -> None:
    wrong = ClusterConfig(account="a\n#SBATCH --nodes=9", time="soon", sbatch=["exclusive"])
    keys = {violation.key for violation in job.violations(wrong, "brew", ROOT)}
    assert keys == {"cluster.account", "cluster.time", "cluster.sbatch", "stage"}


def test_jobs_of_another_folder_use_the_scripts_of_the_package(tmp_path: Path) -> None:
    assert job.violations(ClusterConfig(), "shard", tmp_path) == []
    scripts = paths.batch_scripts(tmp_path)
    assert paths.batch_scripts(ROOT) is None
    text = job.render(dataclasses.replace(PRETRAIN, directory=tmp_path, scripts=scripts), ClusterConfig())
    assert f"\nexport PIPELINE_SLURM={scripts}\nexport PIPELINE_PYTHON={sys.executable}\nexec bash {scripts}/pretrain.sbatch " in text
    line = job.sbatch_line(ClusterConfig(), "pretrain", 2, ["run_dir=my runs"], scripts)
    assert line.startswith(f"env PIPELINE_SLURM={scripts} PIPELINE_PYTHON={sys.executable} sbatch --nodes=2 ")
    assert line.endswith(f"{scripts}/pretrain.sbatch 'run_dir=my runs'")


def test_scripts_of_another_folder_run_the_stage_with_its_python(tmp_path: Path) -> None:
    """Their srun is replaced by a script that prints its arguments. The site's settings come from the working directory if it has some."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text('#!/bin/bash\necho "$SITE" "$@"\n')
    (tmp_path / "bin/srun").chmod(0o755)
    text = job.render(dataclasses.replace(PRETRAIN, directory=tmp_path, scripts=paths.SLURM_DIR), ClusterConfig())
    variables = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_CLUSTER_NAME": "mine", "SLURM_JOB_ID": "7"}

    def printed() -> str:
        done = subprocess.run(["bash"], input=text, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    command = f"--kill-on-bad-exit=1 {' '.join(rank_step.SHELL)} {sys.executable} -m pipeline stage=pretrain {' '.join(PRETRAIN.overrides)}"
    assert printed() == command
    (tmp_path / "slurm/sites").mkdir(parents=True)
    (tmp_path / "slurm/sites/mine.sh").write_text("export SITE=mine\n")
    assert printed() == f"mine {command}"


@pytest.mark.parametrize("time", ["01:00:00", "7-12", "1-00:30:00", "10:30", "UNLIMITED"])
def test_times_of_slurm(time: str) -> None:
    assert job.violations(ClusterConfig(time=time), "shard", ROOT) == []


def test_an_unquoted_yaml_time_is_refused() -> None:
    time = str(OmegaConf.create("time: 24:00:00").time)
    assert [v.key for v in job.violations(ClusterConfig(time=time), "shard", ROOT)] == ["cluster.time"]


def test_submission_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not installed on this machine"):
        submission.submit("#!/bin/bash\n")


def test_a_range_of_nodes_is_for_training_alone() -> None:
    wide = ClusterConfig(nodes=64, min_nodes=8, tasks_per_node=4, cpus_per_task=12)
    assert job.size_options(wide, "pretrain", 64) == ["--nodes=8-64", "--mincpus=48", "--no-kill"]
    assert job.size_options(wide, "pretrain", 8) == ["--nodes=8", "--ntasks-per-node=4"]
    assert job.size_options(wide, "tokenize", 64) == ["--nodes=64", "--ntasks-per-node=4"]
    line = job.sbatch_line(wide, "pretrain", 256, ["cluster.min_nodes=8"])
    assert line.startswith("sbatch --nodes=8-64 --mincpus=48 --no-kill --cpus-per-task=12 ")
