"""tools/checkpoint: what it prints of small checkpoints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint import catalog, commit, inspection, native, stored_runs
from tests.checkpoint import small_checkpoints
from tests.helpers import ROOT


@pytest.fixture
def tool(call_tool) -> Callable[..., tuple[int, str]]:
    return partial(call_tool, "checkpoint")


WRITERS = {"format 1": small_checkpoints.write_format_1, "format 2": small_checkpoints.write}


@pytest.fixture(params=WRITERS)
def write(request) -> Callable[..., Path]:
    return WRITERS[request.param]


def test_inspect_prints_everything_of_both_formats(tool, tmp_path, write):
    state = small_checkpoints.state()
    state["b.bias"]["exp_avg"][3] = np.inf
    folder = write(tmp_path, state, 7)
    code, text = tool("inspect", tmp_path, "--norms", "--json")
    found = json.loads(text)
    assert (code, found["path"], found["train_state"]["samples"]) == (0, str(folder), 28)
    assert found["run"] == {"complete": [7], "kept": {}, "pending": []}
    assert found["settings"] == {"run_dir": "runs/x", "training.steps": 10, "optimizer.lr": 0.001}, "the seed is the default"
    assert found["state_bytes"] == sum(array.nbytes for kinds in state.values() for array in kinds.values())
    for name, kinds in state.items():
        assert found["tensors"][name]["shape"] == list(kinds["weight"].shape)
        assert found["tensors"][name]["kinds"].keys() == kinds.keys()
        for kind, array in kinds.items():
            known, finite = found["tensors"][name]["kinds"][kind], array[np.isfinite(array)].astype("f8")
            assert known["norm"] == pytest.approx(np.linalg.norm(finite))
            assert known["largest"] == pytest.approx(np.abs(finite).max())
            assert (known["elements"], known["not_finite"]) == (array.size, array.size - finite.size)
    assert found["kinds"]["weight"]["dtypes"] == {"F32": 16 * 12 + 20, "F16": 6}


def test_inspect_is_a_table_without_reading_tensors(tool, tmp_path):
    folder = small_checkpoints.write(tmp_path, small_checkpoints.state(), 7)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"")
    code, text = tool("inspect", folder, "--top", 1)
    rows = [line.split() for line in text.splitlines()]
    assert code == 0
    assert ["step", "7:", "7", "updates,", "28", "samples"] in rows
    assert ["layout", "world_size=2", "tensor=2"] in rows
    assert ["weight", "3", "218", "F32,", "F16", "-", "-"] in rows
    assert ["a.weight", "16", "x", "12", "192", "88.1%", "-", "-"] in rows
    assert ["and", "2", "more;", "--top", "0", "lists", "all"] in rows


def test_bf16_is_read(tmp_path):
    values = np.array([1.5, -2.0, 0.0], "f4")
    path = tmp_path / "file"
    path.write_bytes((values.view("u4") >> 16).astype("u2").tobytes())
    run = stored_runs.StoredRun("a", "weight", (3,), ((0, 3),), 0, 3, "BF16", 0, 0)
    assert np.concatenate(list(stored_runs.values(path, run))).tolist() == values.tolist()


def test_diff_is_empty_whatever_layout_and_format(tool, tmp_path):
    state = small_checkpoints.state()
    state["b.bias"]["exp_avg"][3] = np.nan
    layouts = {"a": {}, "b": {"columns": True}, "c": {"writers": 3}, "d": {"block_bytes": 128}}
    folders = [small_checkpoints.write(tmp_path / name, state, 7, **layout) for name, layout in layouts.items()]
    folders.append(small_checkpoints.write_format_1(tmp_path / "e", state, 7))
    for folder in folders:
        assert tool("diff", folders[0], folder, "--read") == (0, "5 tensors are equal, 0 differ\n")
        code, text = tool("diff", folders[0], folder)
        assert (code, text.startswith("5 tensors are equal")) == (0, True)


@pytest.mark.parametrize("damaged", ["A", "B", "both"])
def test_tensors_with_equal_digests_are_read_on_request_only(tool, tmp_path, damaged):
    a, b = (small_checkpoints.write(tmp_path / name, small_checkpoints.state(), 7) for name in "ab")
    assert tool("diff", a, b) == (0, "5 tensors are equal (5 by digest, not read; --read reads them), 0 differ\n")
    for folder in {"A": [a], "B": [b], "both": [a, b]}[damaged]:
        path = folder / "rank-00001.safetensors"
        path.write_bytes(bytes(path.stat().st_size))
    assert tool("diff", a, b)[0] == 0, "the digests are those of the indexes"
    code, text = tool("diff", a, b, "--read")
    assert code == 2
    assert "rank-00001.safetensors" in text
    assert json.loads(tool("diff", a, b, "--json")[1])["by_digest"] == 5


@pytest.mark.parametrize("name", ["rank-00001.safetensors", native.PARTS])
@pytest.mark.parametrize("missing", [True, False])
def test_diff_refuses_files_that_are_missing_or_short(tool, tmp_path, name, missing, write):
    a, b = (write(tmp_path / run, small_checkpoints.state(), 7) for run in "ab")
    if not (path := b / name).exists():
        pytest.skip("format 1 has no such file")
    path.unlink() if missing else path.write_bytes(path.read_bytes()[:-8])
    code, text = tool("diff", a, b)
    assert code == 2
    assert f"{path}: {'is missing' if missing else 'has '}" in text
    assert write is small_checkpoints.write_format_1 or tool("diff", a, b, "--settings") == (0, "")


def test_diff_names_settings_and_tensors(tool, tmp_path, write, monkeypatch):
    monkeypatch.setattr("pipeline.checkpoint.difference._CHUNK", 16)
    other = small_checkpoints.state()
    a = write(tmp_path / "a", small_checkpoints.state(), 7)
    weight = other["a.weight"]["weight"]
    before = weight[2, 3].copy()
    weight[2, 3] += 0.5
    other["d.new"] = other.pop("c.frozen")
    b = write(tmp_path / "b", other, 8, optimizer={"lr": 0.002})
    code, text = tool("diff", tmp_path / "a", b, "--json")
    found = json.loads(text)
    assert (code, found["a"], found["equal"]) == (1, str(a), 3)
    assert found["settings"].keys() == {"optimizer.lr", "train_state.step", "train_state.samples", "train_state.updates"}
    assert found["settings"]["optimizer.lr"] == {"a": 0.001, "b": 0.002}
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert {name: tensor["reason"] for name, tensor in tensors.items()} == {"a.weight": "", "c.frozen": "not in B", "d.new": "not in A"}
    gap = abs(float(weight[2, 3]) - float(before))
    assert (tensors["a.weight"]["differing"], tensors["a.weight"]["absolute"]) == (1, gap)
    assert tensors["a.weight"]["relative"] == pytest.approx(gap / max(abs(before), abs(weight[2, 3])))
    whole = np.linalg.norm(small_checkpoints.state()["a.weight"]["weight"])
    assert tensors["a.weight"]["norm"] == pytest.approx(gap / whole), "equal chunks are a part of the norm of A"
    code, text = tool("diff", a, b)
    assert code == 1
    assert "optimizer.lr" in text
    assert "3 tensors are equal" in text
    assert ", 3 differ\n" in text
    assert tool("diff", a, b, "--tensors")[1].count("train_state") == 0
    assert tool("diff", a, a, "--settings") == (0, "")


def test_verify_of_a_run_reads_all_checkpoints(tool, tmp_path):
    for step in (1, 2):
        folder = small_checkpoints.write(tmp_path, small_checkpoints.state(step), step)
    assert tool("verify", tmp_path)[0] == 0
    commit.begin(tmp_path, small_checkpoints.index(3), "other", 5)
    path = folder / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    code, text = tool("verify", tmp_path)
    assert code == 1
    assert f"{catalog.folder_of(tmp_path, 1)}: whole" in text
    assert f"{folder}: 1 damaged" in text
    assert ".step-00000003.other.partial: 0 of 5 records" in text
    code, text = tool("verify", folder, "--json")
    assert (code, [len(found) for found in json.loads(text)["damaged"].values()]) == (1, [1])


def test_verify_reports_a_save_of_a_run_without_checkpoints(tool, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    commit.begin(tmp_path, small_checkpoints.index(3), "other", 5)
    code, text = tool("verify", tmp_path)
    assert code == 0
    assert ".step-00000003.other.partial: 0 of 5 records" in text


def test_a_kept_checkpoint_outlives_newer_ones(tool, tmp_path):
    folders = [small_checkpoints.write(tmp_path, small_checkpoints.state(step), step) for step in range(1, 5)]
    assert tool("keep", folders[0], "before cooldown") == (0, f"{folders[0]} is kept as 'before cooldown'\n")
    assert tool("keep", folders[1], "old")[0] == 0
    assert tool("keep", tmp_path, "--list") == (0, f"{folders[0]}  before cooldown\n{folders[1]}  old\n")
    assert tool("keep", folders[1], "--remove")[0] == 0
    catalog.prune(tmp_path, 1)
    assert native.complete(tmp_path) == [folders[0], folders[3]]
    assert "for ever, as 'before cooldown'" in tool("inspect", folders[0])[1]


def test_a_name_is_that_of_one_checkpoint(tool, tmp_path):
    first, second = (small_checkpoints.write(tmp_path, small_checkpoints.state(step), step) for step in (1, 2))
    assert tool("keep", first, "best")[0] == 0
    assert tool("keep", first, "best")[0] == 0
    code, text = tool("keep", second, " best ")
    assert (code, inspection.kept(tmp_path)) == (2, {first: "best"})
    assert f"is the name of {first}" in text
    assert tool("keep", first, "--remove")[0] == 0
    assert tool("keep", second, "best")[0] == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["inspect", "RUN/typo"], "PATH=RUN/typo: contains no checkpoint"),
        (["diff", "RUN", "RUN/typo"], "PATH=RUN/typo: contains no checkpoint"),
        (["verify", "RUN/typo"], "PATH=RUN/typo: contains no checkpoint"),
        (["keep", "RUN"], "give a NAME, or --list, or --remove"),
        (["keep", "RUN", "x", "--remove"], "give a NAME, or --list, or --remove"),
        (["keep", "RUN", " "], "must be one line of text"),
        (["keep", "RUN", "--remove"], "is not kept under a name"),
        (["inspec", "RUN"], "invalid choice: 'inspec'"),
    ],
)
def test_mistakes_are_refused(tool, tmp_path, words, message):
    small_checkpoints.write(tmp_path, small_checkpoints.state(), 1)
    code, text = tool(*(word.replace("RUN", str(tmp_path)) for word in words))
    assert code == 2
    assert message.replace("RUN", str(tmp_path)) in text


def test_damage_is_told_by_the_other_commands(tool, tmp_path):
    folder = small_checkpoints.write(tmp_path, small_checkpoints.state(), 1)
    shutil.copytree(folder, tmp_path / "copy")
    (folder / native.PARTS).unlink()
    code, text = tool("inspect", folder, "--norms")
    assert code == 2
    assert f"tools/checkpoint verify {folder}" in text


def test_a_step_of_a_run_is_one_checkpoint(tool, tmp_path):
    """RUN/step-N stands for a checkpoint in every command, and not for a run directory."""
    for step in (1, 2):
        folder = small_checkpoints.write(tmp_path, small_checkpoints.state(step), step)
    code, text = tool("inspect", tmp_path / "step-2", "--top", 1)
    assert code == 0
    assert text.startswith(str(folder))
    assert "steps of run" not in text
    assert "run" not in json.loads(tool("inspect", tmp_path / "step-2", "--json")[1])
    assert tool("verify", tmp_path / "step-1") == (0, f"{catalog.folder_of(tmp_path, 1)}: whole\n")
    assert tool("keep", tmp_path / "step-1", "first")[0] == 0
    assert tool("keep", tmp_path / "step-2", "--list") == (0, f"{catalog.folder_of(tmp_path, 1)}  first\n")
    for command in ("inspect", "verify"):
        code, text = tool(command, tmp_path / "step-3")
        assert code == 2
        assert "step-3: is not a complete checkpoint; " in text
        assert "has those of steps 1, 2" in text


@pytest.mark.parametrize("damaged", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("read_lines", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_exit_code_of_verify_does_not_depend_on_who_reads_its_output(tmp_path, damaged, read_lines):
    """As in a pipe to head -1."""
    for step in range(1, 4):
        folder = small_checkpoints.write(tmp_path, small_checkpoints.state(), step)
        if damaged:
            (folder / native.PARTS).unlink()
    command = [sys.executable, str(ROOT / "tools/checkpoint"), "verify", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for _ in range(read_lines):
            process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait() == int(damaged), errors
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def test_a_missing_file_is_a_few_lines(tool, tmp_path):
    folder = small_checkpoints.write(tmp_path, small_checkpoints.state(), 1)
    (folder / "rank-00001.safetensors").unlink()
    code, text = tool("verify", folder)
    assert code == 1
    lines = text.splitlines()
    assert len(lines) == 5, lines
    assert lines[-1] == "  rank-00001.safetensors: 2 more parts: cannot be read: No such file or directory; --json names all"
    assert len(json.loads(tool("verify", folder, "--json")[1])["damaged"][str(folder)]) == 5
