"""tools/wandb_sync: every value of metrics.jsonl is in one run of Weights & Biases, also after a restart and a damaged line."""

from __future__ import annotations

import json
import runpy
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.common import wandb_run
from tests.helpers import ROOT
from tests.report import builder


def history(folder: Path) -> tuple[str, dict[int, dict[str, Any]]]:
    """The id and the values by step in the only offline folder: a leveldb log of blocks of 32 KiB, with 7 bytes before the first record."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its process writes the rest of the file as it ends, as it does with that of the tool
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    content, place, part = path.read_bytes(), 7, b""
    found: dict[int, dict[str, Any]] = {}
    name = ""
    while place + 7 <= len(content):
        if (left := 32_768 - place % 32_768) < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        part += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record.FromString(part)
            part = b""
            name = record.run.run_id or name
            values = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            if values:
                found[values.pop("_step")] = {key: value for key, value in values.items() if not key.startswith("_")}
    return name, found


@pytest.fixture(scope="module")
def sync() -> Callable[[list[str]], int]:
    main: Callable[[list[str]], int] = runpy.run_path(str(ROOT / "tools/wandb_sync"))["main"]
    return main


def test_all_values_of_a_restarted_run_are_in_one_run(
    sync: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = builder.restarted(tmp_path / "run")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 101, "lo')
    expected: dict[int, dict[str, Any]] = {}
    for line in lines:
        expected.setdefault(line["step"], {}).update({k: v for k, v in line.items() if k != "step" and v is not None})
    assert sync([str(run_dir), "--offline", str(tmp_path / "copy")]) == 0
    name, found = history(tmp_path / "copy")
    assert name == wandb_run.run_id(run_dir)
    assert found == expected
    printed = capsys.readouterr()
    assert "100 steps written to a new folder in" in printed.out
    assert "metrics.jsonl" in printed.err, "the damaged line is named"


def test_the_newest_step_of_a_running_run_is_left_for_later(sync: Callable[[list[str]], int], tmp_path: Path) -> None:
    run_dir = builder.write(tmp_path / "run", builder.steps(1, 5))
    builder.events(run_dir, (time.time() - builder.BEGIN - 5, "run_start", {"step": 0, "nodes": ["a"], "ranks": 1}))
    assert sync([str(tmp_path), "--offline", str(tmp_path / "copy")]) == 0
    assert list(history(tmp_path / "copy")[1]) == [1, 2, 3, 4]


def test_folders_without_a_run_and_runs_that_send_themselves_are_refused(
    sync: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sync([str(tmp_path)])
    run_dir = builder.write(tmp_path / "run", builder.steps(1, 5))
    builder.events(run_dir, (time.time() - builder.BEGIN - 5, "run_start", {"step": 0, "nodes": ["a"], "ranks": 1}))
    with open(run_dir / "config.yaml", "a") as file:
        file.write("tracking: {wandb: online}\n")
    assert sync([str(run_dir)]) == 2
    assert "sends its metrics itself (tracking.wandb=online)" in capsys.readouterr().err
