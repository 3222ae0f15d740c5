"""tools/numerics: a part of its table passes, and a wrong gradient fails."""

import pytest

from pipeline.models.config_classes import CONFIG_CLASSES
from tests.helpers import ROOT, python

#: Layouts of eight ranks with all of tensor, pipeline and data parallelism; tests/training/test_layouts.py trains more on four.
ROWS = [f"{family} tensor 2 pipeline 2 data 2 zero 1 1f1b" for family in ("gpt1", "opt")]  # families whose layouts no other test trains


def numerics(*arguments: str, expect: int = 0) -> str:
    code, printed = python(ROOT / "tools" / "numerics", *arguments, timeout=900)
    assert code == expect, printed
    return printed


@pytest.mark.world
@pytest.mark.long
def test_layouts_equal_the_reference():
    printed = numerics(*(f"--layout={row}" for row in ROWS))
    found = [" ".join(line.split()) for line in printed.splitlines()]
    assert [row for row in ROWS if not any(line.startswith(f"{row} ") for line in found)] == []


@pytest.mark.world
@pytest.mark.long
def test_a_gradient_scaled_by_1_percent_fails():
    printed = numerics("--layout=gpt1 tensor 2 pipeline 1 data 4 zero 1 1f1b", "--spoil", expect=1)
    assert "FAILED, worst gradient blocks.0.mlp_norm.weight" in printed


def test_every_family_has_at_least_six_layouts_and_gpt_and_llama_sixteen():
    rows = [line.split(maxsplit=1) for line in numerics("--list").splitlines()]
    assert {family for family, _ in rows} >= CONFIG_CLASSES.keys()
    for family in CONFIG_CLASSES:
        layouts = [layout for name, layout in rows if name == family]
        assert len(set(layouts)) == len(layouts) >= (16 if family in ("gpt", "llama") else 6)
