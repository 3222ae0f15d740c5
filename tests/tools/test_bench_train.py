"""The table of tools/bench_train, without assertions on times."""

import os
import subprocess
import sys

from tests.helpers import ROOT

TINY = ["--model=llama-tiny", "--batch=2", "--sequence=16", "--steps=2", "--rounds=1"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/bench_train"), *TINY, *arguments]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)


def test_all_implementations_do_the_same_work():
    done = bench("--dtype=fp32", "--only=ours", "--only=plain", "--only=trainer")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "4.8 M parameters; 2 x 16 tokens, fp32" in lines[0]
    heads = next(line for line in lines if "tokens/s" in line).replace("x plain", "").split()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("ours  ", "plain  ", "trainer  "))}
    assert heads[-1] == "loss"
    losses = [float(row[-1]) for row in rows.values()]
    assert rows.keys() == {"ours", "plain", "trainer"}
    assert max(losses) - min(losses) <= 1e-4, rows
    assert sum(line.startswith("ours: ") and line.endswith(("met", "MISSED")) for line in lines) == 4


def test_illegal_options_are_refused():
    unknown = bench("--model=llama-tony")
    assert unknown.returncode == 2
    assert "llama-tiny" in unknown.stderr
    too_long = bench("--sequence=5000")
    assert too_long.returncode == 2
    assert "training.sequence_length=5000: must not exceed model.max_positions=2048" in too_long.stderr
