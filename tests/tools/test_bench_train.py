"""The table of tools/bench_train, without assertions on times."""

import pytest

from tests.helpers import ROOT, python
from tools.bench import harness
from tools.bench.harness import Column, Target

TINY = ["--model=llama-tiny", "--batch=2", "--sequence=16", "--steps=2", "--rounds=1"]


def test_a_ratio_to_an_implementation_that_was_not_measured_is_left_out() -> None:
    results = {"ours": {"speed": 4.0}, "peer": {"speed": 2.0}}
    ratios = [Column("x peer", "speed", beside="peer"), Column("x other", "speed", beside="other")]
    lines = [line.split() for line in harness.table(results, [Column("speed", "speed", "{:.1f}"), *ratios]).splitlines()]
    assert lines == [["speed", "x", "peer", "x", "other"], ["ours", "4.0", "2.000", "-"], ["peer", "2.0", "1.000", "-"]]
    bounds = [Target("ours", ratio, at_least=3.0) for ratio in ratios]
    assert harness.targets(results, bounds) == ["ours: x peer                 2, target at least 3: MISSED"]


def bench(*arguments: str, expect: int = 0) -> str:
    code, printed = python(ROOT / "tools/bench_train", *TINY, *arguments)
    assert code == expect, printed
    return printed


@pytest.mark.long
def test_all_implementations_do_the_same_work():
    lines = bench("--dtype=fp32", "--only=ours", "--only=plain", "--only=trainer").splitlines()
    assert any("4.8 M parameters; 2 x 16 tokens, fp32" in line for line in lines), lines
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("ours  ", "plain  ", "trainer  "))}
    assert any("tokens/s" in line and line.endswith("loss") for line in lines), "the head of the table"
    losses = [float(row[-1]) for row in rows.values()]
    assert rows.keys() == {"ours", "plain", "trainer"}
    assert max(losses) - min(losses) <= 1e-4, rows
    assert sum(line.startswith("ours: ") and line.endswith(("met", "MISSED")) for line in lines) == 4


@pytest.mark.long
def test_illegal_options_are_refused():
    assert "llama-tiny" in bench("--model=llama-tony", expect=2)
    too_long = bench("--sequence=5000", expect=2)
    assert "training.sequence_length=5000: must not exceed model.max_positions=2048" in too_long
