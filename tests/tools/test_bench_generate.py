"""The tables of tools/bench_generate, without assertions on times."""

import pytest

from tests.helpers import ROOT, python

pytestmark = pytest.mark.long


def test_all_implementations_generate_the_same_tokens():
    options = ("--model=llama-tiny", "--tokens=4", "--prompt=5", "--rounds=1", "--batch=2", "--dtype=fp32", "--mixed")
    code, printed = python(ROOT / "tools/bench_generate", *options)
    assert code == 0, printed
    lines = printed.splitlines()
    assert any("4.8 M parameters, fp32; 2 x (5 + 4) tokens, mixed lengths" in line for line in lines)
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("ours  ", "transformers  ", "static  "))}
    assert rows.keys() == {"ours", "transformers", "static"}
    assert rows["ours"][-1] == "100.0%"
    assert rows["transformers"][1:] == ["1.000", rows["transformers"][2], "-"]


def test_illegal_options_are_refused():
    code, printed = python(ROOT / "tools/bench_generate", "--model=llama-tiny", "--tokens=5000")
    assert code == 2
    assert "exceed model.max_positions of llama-tiny by 2984" in printed
