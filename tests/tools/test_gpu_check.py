"""tools/gpu_check on a CPU: it passes, planted faults fail by name, and a section that fails or hangs leaves the others alone."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, python
from tools.gpu import sections
from tools.gpu.rows import Row, Setup

TOOL = ROOT / "tools" / "gpu_check"


def gpu_check(folder: Path, *arguments: str, expect: int = 0) -> tuple[dict[str, dict[str, Any]], str]:
    """Run the tool; returns the rows of its JSON by "section: name", and what it printed."""
    code, printed = python(TOOL, "--quick", f"--out={folder}", *arguments, timeout=900)
    assert code == expect, printed
    content = json.loads((folder / "gpu_check.json").read_text())
    assert content["verdict"] in printed
    rows = {f"{row['section']}: {row['name']}": row for row in content["rows"]}
    assert len(rows) == len(content["rows"]), "names are unique"
    table = printed.splitlines()[1 : len(rows) + 1]
    assert [line.split()[0] for line in table] == [row["section"] for row in content["rows"]]
    return rows, printed


@pytest.mark.long
@pytest.mark.world
def test_everything_passes(tmp_path):
    rows, printed = gpu_check(tmp_path)
    assert {row["section"] for row in rows.values()} == set(sections.SECTIONS)
    assert [name for name, row in rows.items() if row["status"] == "failed"] == []
    assert printed.splitlines()[-2].startswith("gpu_check: PASSED on CPU")
    assert rows["kernels: attention causal 64 bf16"]["value"] > 0
    assert rows["step: llama: graphs of 4 equal blocks"]["value"] == 1


@pytest.mark.long
def test_a_wrong_scale_and_a_value_that_is_read_fail(tmp_path):
    rows, printed = gpu_check(tmp_path, "--only=kernels,step", "--spoil", expect=1)
    attention = {name: row for name, row in rows.items() if "attention" in name and row["status"] != "skipped"}
    assert len(attention) > 15
    assert {row["status"] for row in attention.values()} == {"failed"}
    assert rows["kernels: RMS norm 128 bf16"]["status"] == "ok"
    waits = rows["step: llama zero 3: waits of the host"]
    assert (waits["status"], waits["value"], waits["bound"]) == ("failed", 1, 0)
    assert rows["step: llama: graph breaks"]["status"] == "ok"
    assert "gpu_check: FAILED in kernels, step on CPU" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--only=kernel",), "kernel: must be of environment, kernels"),
        (("--ranks=0",), "--ranks: 0: must be at least 1"),
        (("--ranks=4", "--only=kernels"), "--ranks: the section `ranks` is not in --only"),
    ],
)
def test_a_wrong_argument_is_refused(tmp_path, arguments, message, capsys):
    parse = runpy.run_path(str(TOOL))["parse"]
    with pytest.raises(SystemExit) as ended:
        parse([f"--out={tmp_path}", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "program, remark",
    [
        ("raise ValueError('no such kernel')", "exit code 1 after: first: ValueError: no such kernel; see"),
        ("os.kill(os.getpid(), 11)", "SIGSEGV after: first: no output; see"),
        ("import time; time.sleep(600)", "did not end within 3 s, after: first; see"),
    ],
)
def test_a_section_that_ends_early_is_a_failed_row(tmp_path, program, remark):
    """Its rows until then are kept."""
    row = json.dumps({"section": "kernels", "name": "first", "status": "ok", "value": 1, "bound": None, "remark": ""})
    words = f"import os, sys; os.write(int(sys.argv[1]), {row.encode() + bytes([10])!r}); {program}"
    first, last = sections.run("kernels", [sys.executable, "-c", words], tmp_path / "log", 3, {})
    assert first == Row("first", value=1.0, section="kernels")
    assert last.status == "failed"
    assert last.remark.startswith(remark)


@pytest.mark.long
def test_an_error_of_a_row_leaves_the_others(monkeypatch):
    """A kernel that raises."""
    import torch

    from tools.gpu import attention

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: out of\nregisters")

    monkeypatch.setattr(attention, "automatic", broken)
    setup = Setup(torch.device("cpu"), 1, quick=True, spoil=False, folder=Path())
    found = {row.name: row for row in attention.rows(setup)}
    assert found["attention causal 64 bf16"] == Row.failed("attention causal 64 bf16", "RuntimeError: CUDA error: out of registers")
    assert found["attention ring 64 bf16"].status == "ok"
