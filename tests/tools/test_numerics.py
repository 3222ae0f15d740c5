"""The audit of every layout against a plain loop: a part of its table, and that it fails when a gradient is wrong."""

import pytest

from pipeline.models.families import FAMILIES
from tests.helpers import ROOT, python

#: Of Llama one row a schedule, every ZeRO stage, sequence parallelism on and off, recomputation; of GPT two of them.
ROWS = [
    "llama tensor 2 pipeline 2 data 2 zero 1 1f1b activation_checkpointing=full",
    "llama tensor 2 pipeline 2 data 2 zero 0 interleaved",
    "llama tensor 2 pipeline 2 data 2 zero 2 zbv",
    "llama tensor 1 pipeline 2 data 4 zero 3 1f1b",
    "llama tensor 4 pipeline 1 data 2 zero 2 1f1b sequence_parallel=false",
    "gpt tensor 2 pipeline 2 data 2 zero 1 1f1b activation_checkpointing=full",
    "gpt tensor 2 pipeline 2 data 2 zero 0 interleaved",
]
#: And those whose layouts no other test trains.
ROWS += [f"{family} tensor 2 pipeline 2 data 2 zero 1 1f1b" for family in ("gpt1", "opt", "bloom", "mistral", "roberta")]


def numerics(*arguments: str, expect: int = 0) -> str:
    code, printed = python(ROOT / "tools" / "numerics", *arguments, timeout=900)
    assert code == expect, printed
    return printed


@pytest.mark.world
def test_layouts_equal_one_plain_process():
    printed = numerics(*(f"--layout={row}" for row in ROWS))
    found = {" ".join(line.split()) for line in printed.splitlines()}
    assert [row for row in ROWS if not any(line.startswith(f"{row} ") for line in found)] == []


@pytest.mark.world
def test_a_gradient_scaled_by_a_hundredth_fails_the_audit():
    printed = numerics("--layout=llama tensor 2 pipeline 2 data 2 zero 0 1f1b", "--spoil", expect=1)
    assert "FAILED, worst gradient blocks.0.mlp_norm.weight" in printed


def test_the_whole_table_has_at_least_six_layouts_a_family_and_sixteen_of_the_first():
    rows = [line.split(maxsplit=1) for line in numerics("--list").splitlines()]
    assert {family for family, _ in rows} >= FAMILIES.keys()
    for family in FAMILIES:
        layouts = [layout for name, layout in rows if name == family]
        assert len(set(layouts)) == len(layouts) >= (16 if family in ("gpt", "llama") else 6)
