"""The table of tools/bench_train, without assertions on times."""

import pytest

from tests.helpers import ROOT, python

pytestmark = pytest.mark.long

TINY = ["--model=llama-tiny", "--batch=2", "--sequence=16", "--steps=2", "--rounds=1"]


def bench(*arguments: str, expect: int = 0) -> str:
    code, printed = python(ROOT / "tools/bench_train", *TINY, *arguments)
    assert code == expect, printed
    return printed


def test_all_implementations_do_the_same_work():
    lines = bench("--dtype=fp32", "--only=ours", "--only=plain", "--only=trainer").splitlines()
    assert any("4.8 M parameters; 2 x 16 tokens, fp32" in line for line in lines), lines
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("ours  ", "plain  ", "trainer  "))}
    assert any("tokens/s" in line and line.endswith("loss") for line in lines), "the head of the table"
    losses = [float(row[-1]) for row in rows.values()]
    assert rows.keys() == {"ours", "plain", "trainer"}
    assert max(losses) - min(losses) <= 1e-4, rows
    assert sum(line.startswith("ours: ") and line.endswith(("met", "MISSED")) for line in lines) == 4


def test_illegal_options_are_refused():
    assert "llama-tiny" in bench("--model=llama-tony", expect=2)
    too_long = bench("--sequence=5000", expect=2)
    assert "training.sequence_length=5000: must not exceed model.max_positions=2048" in too_long
