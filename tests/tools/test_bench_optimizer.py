"""tools/bench_optimizer compares implementations that make the same updates."""

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.long


def test_ours_and_torch_muon_make_the_same_updates():
    command = [sys.executable, ROOT / "tools" / "bench_optimizer", "--width", "64", "--layers", "1", "--steps", "1"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    difference = float(re.search(r"after 3 steps: (\S+)", printed)[1])
    assert difference < 1e-4, "of three updates of 0.2 x 1e-3 x sqrt(64 / rows) at most, in bf16"
    # Momentum of matrices, both moments of the rest; adamw has two moments of all weights and no memory of its own.
    assert re.search(r"^adamw .* 8\.00 +0\.00", printed, re.M)
    state = float(re.search(r"^muon +\S+ +\S+ +(\S+)", printed, re.M)[1])
    assert 4 < state < 8
