"""A checkpoint is complete or not there: killed at any call, on a full disk, with damaged files; and which checkpoints are kept."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.checkpoint import catalog, checked_json, commit, native, save
from pipeline.checkpoint.data_file import write
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.parts import Part, read_rows
from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.records import write_record
from pipeline.checkpoint.stored_runs import runs_of_rows
from pipeline.checkpoint.verify import damages
from pipeline.common.atomic_files import remove_leftovers
from pipeline.common.errors import UserError
from pipeline.parallel.pieces import Piece
from tests.checkpoint.killed import Calls, Killed, failing

KINDS = {"weight": "F32", "exp_avg": "F32"}


@pytest.fixture(autouse=True)
def _unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of these tests has to survive a power failure."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def values(step: int) -> dict[str, torch.Tensor]:
    """The state after a step."""
    return {"a": torch.arange(12.0).view(4, 3) + step, "b": torch.arange(5.0) * step}


def write_parts(run_dir: Path, step: int) -> Path:
    """Begin a checkpoint and write the files and records of two writers, each with about half of the elements."""
    folder = commit.begin(run_dir, Index(TrainState(step), {}), "attempt", 2)
    for writer in range(2):
        own = {"a": (6 * writer, 6), "b": (3 * writer, 3 - writer)}
        parts = [Part(n, tuple(v.shape), tuple((0, s) for s in v.shape), *own[n], 512, KINDS) for n, v in values(step).items()]
        contents = [values(step)[part.name].flatten()[part.start : part.start + part.count].numpy() for part in parts]
        written = write(folder / save.file_name(writer), parts, lambda number, _, contents=contents: [contents[number].data])
        write_record(folder, writer, [written])
    return folder


def begun(run_dir: Path) -> None:
    """A run with a checkpoint of step 1."""
    write_parts(run_dir, 1)
    commit.commit(run_dir)


def start(run_dir: Path) -> list[int]:
    """What a start does; returns the steps of the complete checkpoints, of which it verifies every byte and value."""
    commit.finish_interrupted(run_dir)
    remove_leftovers(run_dir / "checkpoints")
    steps = [native.step_of(path) for path in native.complete(run_dir)]
    for path in native.complete(run_dir)[-1:]:
        index = native.read_index(path)
        runs = list(runs_of_rows(read_rows(path / native.PARTS), index.kinds, index.tensors))
        assert not list(damages(path, index.files, index.tensors, runs))
        for name, expected in values(index.train_state.step).items():
            assert torch.equal(Checkpoint(path).tensor(name), expected)
        assert sorted(p.name for p in path.iterdir()) == ["index.json", "parts.npy", "rank-00000.safetensors", "rank-00001.safetensors"]
    found = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert found == ["catalog.json", *(native.folder_of(run_dir, step).name for step in steps)], "nothing else is left"
    return steps


def attempt(run_dir: Path) -> None:
    """Save step 2, and remove step 1."""
    write_parts(run_dir, 2)
    commit.commit(run_dir)
    catalog.prune(run_dir, keep=1)


def run_killed(run_dir: Path, after: int, function: object) -> bool:
    """Call a function that is killed after so many calls; returns whether it was."""
    try:
        with failing(Calls(after)):
            function(run_dir)  # type: ignore[operator]
    except Killed:
        return True
    return False


def test_a_kill_at_any_call_leaves_a_complete_checkpoint_or_none(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    with failing(Calls(10**6)) as calls:
        shutil.copytree(tmp_path / "run", tmp_path / "count")
        before = calls.made
        write_parts(tmp_path / "count", 2)
        with_all_records = calls.made - before
        commit.commit(tmp_path / "count")
        catalog.prune(tmp_path / "count", keep=1)
        every = calls.made - before
    assert every > with_all_records > 20
    for after in range(every + 1):
        run_dir = tmp_path / str(after)
        shutil.copytree(tmp_path / "run", run_dir)
        assert run_killed(run_dir, after, attempt) == (after < every)
        steps = start(run_dir)
        assert steps in ([1], [1, 2], [2]), f"killed after call {after}"
        assert 2 in steps or after < with_all_records, "all parts were there"


@pytest.mark.parametrize("at", ["records", "index", "renamed"])
def test_a_kill_while_an_interrupted_commit_is_finished(tmp_path: Path, at: str) -> None:
    run_dir = tmp_path / "run"
    begun(run_dir)
    folder = write_parts(run_dir, 2)
    if at != "records":
        pending = catalog.read(run_dir)
        commit.commit(run_dir)
        (final := native.folder_of(run_dir, 2)).rename(folder)
        for writer, record in enumerate(write_records(tmp_path / "other")):
            shutil.copy(record, folder / f"record-{writer:05d}.json")
        shutil.copy(tmp_path / "other" / "draft.json", folder / "draft.json")
        if at == "renamed":
            folder.rename(final)
        catalog.write(run_dir, pending)
    after, killed = 0, True
    while killed:
        copy = tmp_path / str(after)
        shutil.copytree(run_dir, copy)
        killed = run_killed(copy, after, commit.finish_interrupted)
        assert start(copy) == [1, 2]
        after += 1
    assert after > 5


def write_records(run_dir: Path) -> list[Path]:
    """The records and the draft of step 2, in a folder of their own."""
    folder = write_parts(run_dir, 2)
    shutil.copy(folder / "draft.json", run_dir / "draft.json")
    return [folder / "record-00000.json", folder / "record-00001.json"]


@pytest.mark.parametrize("damage", ["record", "torn record", "flipped byte", "truncated", "file", "draft"])
def test_an_incomplete_attempt_is_removed_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    begun(tmp_path)
    folder = write_parts(tmp_path, 2)
    record, file = folder / "record-00001.json", folder / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "record":
        record.unlink()
    elif damage == "torn record":
        record.write_bytes(record.read_bytes()[:-9])
    elif damage == "flipped byte":
        content[content.index(values(2)["a"].numpy().tobytes()[24:36])] ^= 1
        file.write_bytes(content)
    elif damage == "truncated":
        file.write_bytes(content[:-8])
    elif damage == "file":
        file.unlink()
    elif damage == "draft":
        (folder / "draft.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert start(tmp_path) == [1]
    said = {
        "record": "1 of 2 records are missing, the first is that of writer 1",
        "torn record": "record-00001.json",
        "flipped byte": "rank-00001.safetensors: weight of a, elements 6 to 11 of 12: other bytes than were saved",
        "truncated": f"rank-00001.safetensors: has {len(content) - 8} bytes, expected {len(content)}",
        "file": "elements 6 to 11 of 12: cannot be read: No such file",
        "draft": "draft.json",
    }
    assert said[damage] in caplog.text
    assert "checkpoint of step 2 of an earlier job" in caplog.text


def full(run_dir: Path, step: int) -> Path:
    """Save full weights in one process."""
    weights = [Fragment(Piece(name, tuple(v.shape)), 0, dict.fromkeys(KINDS, v.flatten())) for name, v in values(step).items()]
    return save.save_full(run_dir, Index(TrainState(step), {}), iter(weights), 10)


def test_a_disk_that_is_full_at_any_call(tmp_path: Path) -> None:
    """Data, record, rows, index and catalog: the message names the run directory, and the next attempt succeeds."""
    full(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "count")
    with failing(Calls(10**6, full=True)) as calls:
        full(tmp_path / "count", 2)
    assert calls.made > 15
    for after in range(calls.made):
        run_dir = tmp_path / str(after)
        shutil.copytree(tmp_path / "run", run_dir)
        message = f"run_dir={run_dir}: the checkpoint could not be written: .Errno 28. No space left"
        with pytest.raises(UserError, match=message), failing(Calls(after, full=True)):
            full(run_dir, 2)
        assert native.step_of(native.complete(run_dir)[0]) == 1
        full(run_dir, 2)
        assert [native.step_of(path) for path in native.complete(run_dir)] == [1, 2]
        assert torch.equal(Checkpoint(native.folder_of(run_dir, 2)).tensor("a"), values(2)["a"])
        remove_leftovers(run_dir / "checkpoints")
        assert len(list((run_dir / "checkpoints").iterdir())) == 3


def test_records_that_do_not_hold_every_element_are_refused(tmp_path: Path) -> None:
    folder = write_parts(tmp_path, 2)
    content = checked_json.read(folder / "record-00001.json")
    content["rows"]["count"][0] -= 1
    checked_json.write(folder / "record-00001.json", content)
    with pytest.raises(ValueError, match="a: its parts have 11 of 12 elements"):
        commit.commit(tmp_path)


def test_digests_of_weights_change_with_their_values_only(tmp_path: Path) -> None:
    """They show a save that repeats another one."""
    digests = []
    for step in (1, 2):
        write_parts(tmp_path, step)
        digests.append({name: entry.digests for name, entry in native.read_index(commit.commit(tmp_path)).tensors.items()})
    write_parts(tmp_path / "other", 2)
    assert {n: e.digests for n, e in native.read_index(commit.commit(tmp_path / "other")).tensors.items()} == digests[1]
    assert all(digests[0][name][kind] != digests[1][name][kind] for name in ("a", "b") for kind in KINDS)


def test_the_newest_checkpoint_is_found_without_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        full(tmp_path, step)
    shutil.rmtree(native.folder_of(tmp_path, 2))
    monkeypatch.setattr(Path, "glob", None)
    monkeypatch.setattr(Path, "iterdir", None)
    assert native.find(tmp_path, "latest") == native.folder_of(tmp_path, 3)
    assert native.complete(tmp_path) == [native.folder_of(tmp_path, step) for step in (1, 3)], "one that was removed by hand is left out"


@pytest.mark.parametrize("content", [None, "", "{}", '{"format": 2, "complete": [1], "pending": null, "xxh3": "0"}'])
def test_a_run_directory_without_a_readable_catalog_is_listed(tmp_path: Path, content: str | None) -> None:
    for step in (1, 2):
        full(tmp_path, step)
    path = tmp_path / "checkpoints" / "catalog.json"
    path.unlink() if content is None else path.write_text(content)
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    assert [native.step_of(folder) for folder in native.complete(tmp_path)] == [1, 2]
    full(tmp_path, 3)
    assert checked_json.read(path)["complete"] == [1, 2, 3]


def test_a_start_finds_a_checkpoint_that_was_copied_into_the_run_directory(tmp_path: Path) -> None:
    full(tmp_path / "other", 7)
    full(tmp_path / "run", 1)
    shutil.copytree(native.folder_of(tmp_path / "other", 7), native.folder_of(tmp_path / "run", 7))
    commit.finish_interrupted(tmp_path / "run")
    assert [native.step_of(folder) for folder in native.complete(tmp_path / "run")] == [1, 7]


def test_which_checkpoints_are_kept(tmp_path: Path) -> None:
    """The newest, every k-th, those with a name, and those that are needed."""
    for step in range(1, 10):
        full(tmp_path, step)
    (native.folder_of(tmp_path, 2) / "keep").write_text("before the spike\n")
    catalog.prune(tmp_path, keep=2, every=4, needed=lambda path: native.step_of(path) == 5)
    assert [native.step_of(folder) for folder in native.complete(tmp_path)] == [2, 4, 5, 8, 9]
    assert catalog.read(tmp_path).complete == catalog.listed(tmp_path) == [2, 4, 5, 8, 9]
    catalog.prune(tmp_path, keep=2)
    assert catalog.listed(tmp_path) == [2, 8, 9]


def test_rows_and_bytes_of_a_large_checkpoint() -> None:
    """What is stored beside the state of 400M parameters on 16 ranks is less than 2 % of its bytes."""
    from pipeline.checkpoint.parts import block_bytes, count_blocks, row_dtype

    layers, hidden, inner, vocab = 24, 1024, 4096, 50304
    shapes = [(vocab, hidden), (vocab, hidden), *[(hidden, hidden)] * 4 * layers, *[(inner, hidden)] * layers, *[(hidden, inner)] * layers]
    sliced = [0, 0, *[0, 0, 0, 1] * layers, *[0] * layers, *[1] * layers]
    elements = sum(int(np.prod(shape)) for shape in shapes)
    assert elements > 400e6
    state, parts = 12 * elements, len(shapes) + 16
    blocks = sum(3 * count_blocks(int(np.prod(s)) * 4, block_bytes(s, d, 4)) for s, d in zip(shapes, sliced, strict=True)) + 3 * parts
    header = 3 * parts * 220  # the entry of a tensor
    entries = len(shapes) * 600 + 16 * 120 + 5000  # of index.json
    assert (8 * blocks + header + parts * row_dtype(3).itemsize + entries) / state < 0.02
