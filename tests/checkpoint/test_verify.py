"""Damage of a checkpoint is found and named: tensor, kind and elements."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint import catalog, commit, native, parts, stored_runs, verify
from pipeline.checkpoint.stored_runs import StoredRun
from tests.checkpoint import small_checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_checkpoints.write(tmp_path, small_checkpoints.state(), 3, columns=True)


def run_of(folder: Path, name: str, kind: str, number: int = 0) -> StoredRun:
    index = native.read_index(folder)
    return [run for run in stored_runs.runs_of_tensor(folder, index, name) if run.kind == kind][number]


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def said(folder: Path) -> list[str]:
    return [str(damage) for damage in verify.verify(folder)]


def test_a_whole_checkpoint_has_no_damage(folder):
    assert said(folder) == []


def test_a_flipped_byte_is_named_by_tensor_kind_and_elements(folder):
    run = run_of(folder, "a.weight", "exp_avg", 1)
    path = folder / "rank-00001.safetensors"
    flip(path, run.offset + 4 * 37 + 3)  # element 37 of 96, in the third block of 16
    where = "elements 32 to 47 of the 96 of its slice [0:16, 6:12]"
    assert said(folder) == [f"rank-00001.safetensors: exp_avg of a.weight, {where}: other bytes than were saved"]
    flip(path, run.offset + 4 * 50)
    assert "elements 32 to 63" in said(folder)[0], "neighboring blocks are one damage"
    flip(path, run.offset + 4 * 95)
    assert len(said(folder)) == 2


def test_elements_of_whole_rows_are_numbered_in_the_full_weight(tmp_path):
    folder = small_checkpoints.write(tmp_path, small_checkpoints.state(), 3)
    run = run_of(folder, "a.weight", "weight", 1)
    flip(folder / "rank-00001.safetensors", run.offset)
    assert "weight of a.weight, elements 96 to 111 of 192" in said(folder)[0]


def test_a_missing_file_is_named_with_all_that_it_held(folder):
    (folder / "rank-00001.safetensors").unlink()
    found = verify.verify(folder)
    assert {(damage.tensor, damage.kind) for damage in found} == {
        *(("a.weight", kind) for kind in ("weight", "exp_avg")),
        *(("b.bias", kind) for kind in ("weight", "exp_avg")),
        ("c.frozen", "weight"),
    }
    assert all("No such file" in damage.what for damage in found)


def test_a_truncated_file_is_named_with_what_is_missing(folder):
    path = folder / "rank-00000.safetensors"
    run = run_of(folder, "b.bias", "exp_avg")
    size = path.stat().st_size
    with open(path, "r+b") as handle:
        handle.truncate(run.offset + 4)
    found = verify.verify(folder)
    assert found[0].what == f"has {run.offset + 4:,} bytes, expected {size:,}"
    assert ("b.bias", "exp_avg") in {(damage.tensor, damage.kind) for damage in found}
    assert ("a.weight", "weight") not in {(damage.tensor, damage.kind) for damage in found}, "what precedes the end is whole"


def test_damaged_block_digests_do_not_hide_which_parts_are_whole(folder):
    path = folder / "rank-00000.safetensors"
    flip(path, path.stat().st_size - 1)
    assert said(folder) == ["rank-00000.safetensors: its block digests are damaged; its parts are verified as a whole"]
    flip(path, run_of(folder, "a.weight", "weight").offset)
    assert "weight of a.weight, elements 0 to 95 of the 96 of its slice [0:16, 0:6]" in said(folder)[1]


def test_a_damaged_header_is_found(folder):
    path = folder / "rank-00000.safetensors"
    flip(path, path.read_bytes().index(b"a.weight"))
    [damage] = said(folder)
    assert damage.startswith("rank-00000.safetensors: its header is damaged")


def test_damaged_rows_concern_their_tensors_alone(folder):
    rows = native.read_index(folder).tensors["b.bias"].rows
    path = folder / native.PARTS
    all_rows = parts.read_rows(path)
    flip(path, path.stat().st_size - (len(all_rows) - rows[0]) * all_rows.itemsize + 1)
    assert {damage.tensor for damage in verify.verify(folder)} == {"b.bias"}


@pytest.mark.parametrize("name", [native.INDEX, native.PARTS])
def test_small_files_are_verified(folder, name):
    flip(folder / name, 40)
    assert name in said(folder)[0]
    (folder / name).unlink()
    assert name in said(folder)[0]


def test_format_1_names_the_file_and_what_it_holds(tmp_path):
    folder = small_checkpoints.write_format_1(tmp_path, small_checkpoints.state(), 3)
    assert said(folder) == []
    flip(folder / "rank-00001.safetensors", -1)
    assert "rank-00001.safetensors: is corrupt" in said(folder)[0]
    assert "it holds weight/a.weight" in said(folder)[0] or "a.weight" in said(folder)[0]


def test_unfinished_saves_and_lost_checkpoints_of_a_run(tmp_path):
    folder = small_checkpoints.write(tmp_path, small_checkpoints.state(), 3)
    assert verify.pending(tmp_path) == []
    commit.begin(tmp_path, small_checkpoints.index(4), "other", 5)
    [said] = verify.pending(tmp_path)
    assert said.startswith(".step-00000004.other.partial: 0 of 5 records, since 20")
    (folder / native.INDEX).unlink()
    assert [str(damage) for damage in verify.verify(folder)] == ["index.json: is missing"]
    assert verify.lost(tmp_path) == []
    shutil.rmtree(folder)
    assert verify.lost(tmp_path) == [catalog.folder_of(tmp_path, 3)]
