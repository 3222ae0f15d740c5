"""The table of tools/bench_finetune, without assertions on times."""

import pytest

from tests.helpers import ROOT, python

pytestmark = pytest.mark.slow


def test_lora_and_peft_do_the_same_work():
    options = ("--model=llama-tiny", "--batch=2", "--sequence=16", "--steps=2", "--rounds=1", "--dtype=fp32", "--rank=4")
    code, printed = python(ROOT / "tools/bench_finetune", *options, "--only=lora", "--only=peft")
    assert code == 0, printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.startswith(("lora  ", "peft  "))}
    assert rows.keys() == {"lora", "peft"}
    assert abs(float(rows["lora"][-1]) - float(rows["peft"][-1])) <= 1e-4, rows
    assert sum(line.startswith("lora: ") and line.endswith(("met", "MISSED")) for line in printed.splitlines()) == 2
