"""The tables of tools/bench_generate, without assertions on times."""

import pytest

from tests.helpers import ROOT, python

pytestmark = pytest.mark.long


def test_both_implementations_generate_the_same_tokens():
    options = (
        "--model=llama-tiny",
        "--tokens=4",
        "--prompt=5",
        "--rounds=1",
        "--batch=2",
        "--dtype=fp32",
        "--mixed",
        "--speculative",
        "--lengths",
        "2",
        "3",
    )
    code, printed = python(ROOT / "tools/bench_generate", *options)
    assert code == 0, printed
    lines = printed.splitlines()
    assert any("4.8 M parameters; 5 + 4 tokens" in line for line in lines)
    (row,) = (line.split() for line in lines if line.split()[:2] == ["fp32", "2"])
    assert row[-1] == "100.0%"
    assert [line.split()[0] for line in lines[-2:]] == ["2", "3"]
    (drafted,) = (line.split() for line in lines if line.split()[:1] == ["fp32"] and len(line.split()) == 6 and "." in line.split()[1])
    assert drafted[-1] == "100.0%"


def test_illegal_options_are_refused():
    code, printed = python(ROOT / "tools/bench_generate", "--model=llama-tiny", "--tokens=5000")
    assert code == 2
    assert "exceed model.max_positions of llama-tiny by 2984" in printed
