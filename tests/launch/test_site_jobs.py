"""A site that is one file of a user, in both kinds of jobs: a rendered one, and plain `sbatch slurm/STAGE.sbatch`.

srun is replaced by a script that prints the variables and arguments that a rank would get, and `module` by a function, as on a cluster.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import command_line, compose
from pipeline.config.schema import RunConfig
from pipeline.launch import job, site
from tests.helpers import ROOT, environment, pipeline

SITE = """\
name: mine
queues:
  - {partition: short, max_nodes: 2, max_time: "01:00:00"}
  - {partition: long, max_time: "24:00:00"}
time: longest
tasks_per_node: 4
cpus_per_task: 2
cores: 8
fabric: AWS Libfabric
modules: [nccl/2.28]
setup: ['export SCRATCH_OF_JOB="/scratch/$SLURM_JOB_ID"']
environment: {NCCL_NET: AWS Libfabric, NCCL_IB_TIMEOUT: 18}
srun: ["--mpi=none", "--cpu-bind=mask_cpu:0x3,0xc,0x30,0xc0"]
launch: [apptainer, exec, --nv, image.sif]
python: python3
"""
TRAINED = ("stage=pretrain", "cluster=mine", "model=llama-tiny", "run_dir=run")
BATCH = ("training.global_batch_size=8", "training.micro_batch_size=1")
PRINTED = ("NCCL_NET", "NCCL_IB_TIMEOUT", "NCCL_DEBUG", "LOADED", "SCRATCH_OF_JOB", "FI_PROVIDER", "TIMES")
EXPECTED = {
    "NCCL_NET": "AWS Libfabric",
    "NCCL_IB_TIMEOUT": "18",
    "LOADED": "nccl/2.28",
    "SCRATCH_OF_JOB": "/scratch/7",
    "FI_PROVIDER": "",
    "TIMES": "1",
}
SRUN = (
    "--kill-on-bad-exit=1 --mpi=none --cpu-bind=mask_cpu:0x3,0xc,0x30,0xc0 "
    'sh -c trap "" USR1; exec "$@" sh apptainer exec --nv image.sif python3 -m pipeline stage=pretrain'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the file of the site, and with an srun."""
    (tmp_path / "conf/cluster").mkdir(parents=True)
    (tmp_path / "conf/cluster/mine.yaml").write_text(SITE)
    (tmp_path / "bin").mkdir()
    lines = [f'echo "{name}=${{{name}:-}}"' for name in PRINTED]
    (tmp_path / "bin/srun").write_text("#!/bin/bash\n" + "\n".join([*lines, 'echo "srun=$*"', ""]))
    (tmp_path / "bin/srun").chmod(0o755)
    return tmp_path


def ran(folder: Path, script: str, *arguments: str, code: int = 0, **variables: str) -> tuple[dict[str, str], str]:
    """Run a batch script as Slurm would on a node with four tasks; returns what the ranks get, and standard error."""
    module = '() { [ "$2" = nccl/2.28 ] || { echo "module $2 is unknown" >&2; return 1; }; export LOADED=$2 TIMES=$((${TIMES:-0} + 1)); }'
    own = {
        "PATH": f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BASH_FUNC_module%%": module,
        "SLURM_JOB_ID": "7",
        "SLURM_TASKS_PER_NODE": "4",
        "PIPELINE_SLURM": str(ROOT / "slurm"),
    }
    words = ["bash", "-s", "--", *arguments]
    done = subprocess.run(words, input=script, cwd=folder, env=environment(**own, **variables), capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line), done.stderr


def config(folder: Path, *words: str) -> RunConfig:
    """The configuration of a command line with the file of the site."""
    compose.register()
    violations, composed = compose.diagnose(command_line.parse([f"--config-dir={folder}/conf", *TRAINED, *words]))
    assert violations == []
    return compose.to_run_config(composed)


def test_a_rendered_job(folder: Path) -> None:
    words = [f"--config-dir={folder}/conf", *TRAINED[1:], "cluster.environment.NCCL_DEBUG=INFO"]
    one = job.Job("a", "pretrain", tuple(words), folder, "a.out", scripts=ROOT / "slurm", python=Path(sys.executable))
    text = job.render(one, dataclasses.replace(config(folder, *words).cluster, nodes=4))
    assert "#SBATCH --partition=long\n" in text
    found, _ = ran(folder, text)
    assert found == EXPECTED | {"NCCL_DEBUG": "INFO", "srun": f"{SRUN} {' '.join(words)}"}


def test_plain_sbatch(folder: Path) -> None:
    words = [f"--config-dir={folder}/conf", *TRAINED[1:], "cluster.environment.NCCL_DEBUG=INFO"]
    found, _ = ran(folder, (ROOT / "slurm/pretrain.sbatch").read_text(), *words)
    assert found == EXPECTED | {"NCCL_DEBUG": "INFO", "srun": f"{SRUN} {' '.join(words)}"}


def test_a_stage_without_gpus_starts_with_mpi(folder: Path) -> None:
    found, _ = ran(
        folder,
        (ROOT / "slurm/shard.sbatch").read_text(),
        f"--config-dir={folder}/conf",
        "cluster=mine",
        "data.input=[a]",
        "cluster.launch=[]",
    )
    assert found["srun"].startswith("--kill-on-bad-exit=1 sh -c")
    assert found["FI_PROVIDER"] == "tcp"


def test_a_module_that_does_not_load_is_named(folder: Path) -> None:
    words = [f"--config-dir={folder}/conf", *TRAINED[1:], "cluster.modules=[cuda/99]"]
    _, said = ran(folder, (ROOT / "slurm/pretrain.sbatch").read_text(), *words, code=2)
    assert "cluster.modules=['cuda/99']: cannot be set up" in said
    assert "module cuda/99 is unknown" in said
    assert not (folder / "run").exists()


def test_a_binding_is_for_whole_nodes(folder: Path) -> None:
    trained = config(folder)
    assert site.srun_options(trained, 4) == site.srun_options(trained, None) == ["--mpi=none", "--cpu-bind=mask_cpu:0x3,0xc,0x30,0xc0"]
    assert site.srun_options(trained, 1) == ["--mpi=none"]


def test_the_chain_and_the_sbatch_line_choose_the_same_queue(folder: Path) -> None:
    words = [f"--config-dir={folder}/conf", "cluster=mine", "model=llama-tiny", f"run_dir={folder}/run", "cluster.nodes=2", *BATCH]
    line = job.sbatch_line(config(folder).cluster, "pretrain", 8, [])
    assert "--partition=short --cpus-per-task=2 --time=01:00:00" in line
    text = pipeline("stage=submit", "submit.stages=[pretrain]", *words, "dry_run=true")
    assert "#SBATCH --partition=short\n" in text
    assert "#SBATCH --time=01:00:00\n" in text
    refused = pipeline("stage=submit", "submit.stages=[pretrain]", *words, "dry_run=true", "cluster.time=30:00:00", expect=2)
    assert "fits no queue of cluster=mine with 2 nodes and 30:00:00: partition short: 1-2 nodes, 01:00:00; partition long" in refused
