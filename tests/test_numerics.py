"""The audit of every layout against a plain loop: a part of its table, and that it fails when a gradient is wrong."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

#: One row a schedule, every ZeRO stage, sequence parallelism on and off, recomputation.
LAYOUTS = (
    "tensor 2 pipeline 2 data 2 zero 1 1f1b",
    "tensor 2 pipeline 2 data 2 zero 0 interleaved",
    "tensor 2 pipeline 2 data 2 zero 2 zbv",
    "tensor 1 pipeline 2 data 4 zero 3 1f1b",
    "tensor 4 pipeline 1 data 2 zero 2 1f1b sequence_parallel=false",
)


def numerics(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools" / "numerics"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_layouts_equal_one_plain_process(family):
    done = numerics("--family", family, *(word for layout in LAYOUTS for word in ("--layout", layout)))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(family)]
    assert len(rows) == len(LAYOUTS) + 1, "the first text is also the beginning of the row with recomputation"


def test_a_gradient_scaled_by_a_hundredth_fails_the_audit():
    done = numerics("--family", "llama", "--layout", "tensor 2 pipeline 2 data 2 zero 0 1f1b", "--spoil")
    assert done.returncode == 1
    assert "FAILED, worst gradient blocks.0.mlp_norm.weight" in done.stdout


def test_the_whole_table_has_at_least_sixteen_layouts_a_family():
    rows = numerics("--list").stdout.splitlines()
    assert len(set(rows)) == len(rows) >= 16
