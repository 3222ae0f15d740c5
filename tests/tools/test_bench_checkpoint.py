"""The report of tools/bench_checkpoint, without assertions on times."""

import json

import pytest

from tests.helpers import ROOT, python

pytestmark = pytest.mark.long


def test_all_implementations_do_the_same_work(tmp_path):
    code, printed = python(ROOT / "tools/bench_checkpoint", "--small", "--rounds=1", "--steps=1", f"--json={tmp_path / 'all.json'}")
    assert code == 0, printed
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["saves"].keys() == {"ours", "dcp-thread", "dcp-process"}
    assert all(result[f"{name} equal"] for result in found["loads"].values() for name in ("ours", "dcp"))
    assert found["export"]["equal"]
    assert found["loads"]["2"]["ours disk"]["bytes"] <= 1.2 * found["loads"]["2"]["needed"]
    assert "UNEQUAL" not in printed
    rows = {line.split()[0] for line in printed.splitlines() if line.startswith("  ")}
    assert {"plain", "ours", "dcp-thread", "dcp-process", "deepspeed"} <= rows
