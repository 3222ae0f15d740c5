"""The variables and limits that ranks of a job start with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.launch import site
from tests.helpers import ROOT
from tests.world import configured


def environment(monkeypatch: pytest.MonkeyPatch, *overrides: str, **given: str) -> dict[str, str]:
    """The environment of ranks, of a job whose shell has set some variables."""
    variables = {"PATH": "/usr/bin", "PIPELINE_SITE": "juwels", **given}
    monkeypatch.setattr(site.os, "environ", variables)
    site.prepare(configured(*overrides))
    return variables


def test_ranks_on_gpus_have_an_allocator_without_holes_and_a_flight_recorder(monkeypatch, tmp_path):
    found = environment(monkeypatch, "stage=pretrain", "cluster=juwels", f"run_dir={tmp_path}/run")
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert int(found["TORCH_FR_BUFFER_SIZE"]) > 0
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/run/flight_recorder/rank_"
    assert found["NCCL_DEBUG"] == "WARN"
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_values_of_the_user_and_of_the_site_are_kept(monkeypatch, tmp_path):
    run = ("stage=pretrain", "cluster=juwels", f"run_dir={tmp_path}/run", "++cluster.environment.NCCL_DEBUG=INFO")
    given = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128", "TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    found = environment(monkeypatch, *run, **given)
    assert found["NCCL_DEBUG"] == "INFO"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found, "the same setting under its later name"
    assert "TORCH_FR_BUFFER_SIZE" not in found


def test_what_a_device_does_not_support_is_not_set(monkeypatch):
    amd = environment(monkeypatch, "stage=pretrain", "cluster=lumi", PIPELINE_SITE="lumi")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in amd
    assert "TORCH_FR_BUFFER_SIZE" in amd
    for words in (("stage=pretrain", "cluster=local"), ("stage=tokenize", "cluster=juwels")):
        assert not site.DEFAULTS.keys() & environment(monkeypatch, *words).keys()


def test_soft_limits_are_raised_to_the_hard_ones():
    script = "ulimit -S -n 64; ulimit -S -l 0; source slurm/site.sh >/dev/null; ulimit -S -n; ulimit -H -n; ulimit -S -l; ulimit -H -l"
    variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PIPELINE_SLURM": "slurm", "PIPELINE_PYTHON": sys.executable}
    said = subprocess.run(["bash", "-c", script], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    soft, hard, locked, most = said.stdout.split()
    assert (soft, locked) == (hard, most), said.stderr


def test_the_memory_of_an_interactive_job_is_not_that_of_a_job_it_submits():
    variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PIPELINE_SLURM": "slurm", "PIPELINE_PYTHON": sys.executable}
    variables |= {"SLURM_MEM_PER_NODE": "4000", "SLURM_MEM_PER_CPU": "100"}
    script = "source slurm/site.sh >/dev/null; echo $SLURM_MEM_PER_NODE:$SLURM_MEM_PER_CPU"
    said = subprocess.run(["bash", "-c", script], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert said.stdout == "4000:\n", said.stderr


def test_a_python_without_the_packages_is_named():
    variables = {"PATH": "/usr/bin:/bin", "PIPELINE_SLURM": "slurm", "PIPELINE_PYTHON": "/none/python"}
    said = subprocess.run(["bash", "-c", "source slurm/site.sh"], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert "/none/python is not a Python with the packages" in said.stderr
