"""tools/gpu_check on the driver without a GPU: its CUDA path runs. Values are zero, so that only counts are right."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.rehearsal import test_contract

pytestmark = [*test_contract.pytestmark, pytest.mark.long]
ROOT = test_contract.ROOT


def test_waits_of_the_host_are_told_with_the_line_of_code(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda"}
    environment |= test_contract.variables_of("h100")
    command = [test_contract.PYTHON, ROOT / "tools/gpu_check", "--quick", "--only=environment,step", "--spoil", f"--out={tmp_path}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = {f"{row['section']}: {row['name']}": row for row in json.loads((tmp_path / "gpu_check.json").read_text())["rows"]}
    assert "H100" in rows["environment: GPU 0"]["remark"]
    assert "expandable_segments:True" in rows["environment: allocator"]["remark"]
    assert [
        rows[f"step: llama: graph{name}"]["value"] for name in ("s of 4 equal blocks", " breaks", "s compiled after the first step")
    ] == [
        1,
        0,
        0,
    ]
    waits = [row for name, row in rows.items() if name.endswith("waits of the host")]
    assert len(waits) == 4
    assert all(row["value"] == 1 and "tools/gpu/step.py:" in row["remark"] for row in waits)
    assert rows["step: retries of the allocator"]["status"] == "ok"
