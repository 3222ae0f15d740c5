"""tools/numerics: a part of its table passes, and a wrong gradient fails."""

import os
import subprocess
import sys

import pytest

from pipeline.models.families import FAMILIES
from tests.helpers import ROOT

#: Every schedule, every ZeRO stage, sequence parallelism on and off, activation recomputation.
LAYOUTS = (
    "tensor 2 pipeline 2 data 2 zero 1 1f1b activation_checkpointing=full",
    "tensor 2 pipeline 2 data 2 zero 0 interleaved",
    "tensor 2 pipeline 2 data 2 zero 2 zbv",
    "tensor 1 pipeline 2 data 4 zero 3 1f1b",
    "tensor 4 pipeline 1 data 2 zero 2 1f1b sequence_parallel=false",
)


def numerics(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools" / "numerics"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("family, layouts", [("gpt", LAYOUTS[:2]), ("llama", LAYOUTS)], ids=["gpt", "llama"])
def test_layouts_equal_the_reference(family, layouts):
    done = numerics("--family", family, *(word for layout in layouts for word in ("--layout", layout)))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(f"{family} ")]
    assert len(rows) >= len(layouts), done.stdout


def test_further_families_in_a_mixed_layout():
    """Families whose layouts no other test trains."""
    families = ("gpt1", "opt", "bloom", "mistral", "roberta")
    done = numerics(*(f"--family={family}" for family in families), "--layout=tensor 2 pipeline 2 data 2 zero 1 1f1b")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines() if "tensor 2" in line} == set(families)


def test_a_gradient_scaled_by_1_percent_fails():
    done = numerics("--family", "llama", "--layout", "tensor 2 pipeline 2 data 2 zero 0 1f1b", "--spoil")
    assert done.returncode == 1
    assert "FAILED, worst gradient blocks.0.mlp_norm.weight" in done.stdout


def test_every_family_has_at_least_six_layouts_and_gpt_and_llama_sixteen():
    rows = [line.split(maxsplit=1) for line in numerics("--list").stdout.splitlines()]
    assert {family for family, _ in rows} >= FAMILIES.keys()
    for family in FAMILIES:
        layouts = [layout for name, layout in rows if name == family]
        assert len(set(layouts)) == len(layouts) >= (16 if family in ("gpt", "llama") else 6)
