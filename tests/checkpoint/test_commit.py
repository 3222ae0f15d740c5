"""A checkpoint is complete or not there: killed at any change of a file, on a full disk, with damaged files; and which are kept."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import resource
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint import catalog, checked_json, commit, native, save, verify
from pipeline.checkpoint.data_file import write
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.parts import Part
from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.records import write_record
from pipeline.common.errors import UserError
from pipeline.config.schema import CheckpointConfig
from pipeline.config.stages import Evaluate
from pipeline.evaluation import checkpoint_selection
from pipeline.parallel.pieces import Piece
from pipeline.training import run_directory
from tests.checkpoint import faulty_disk

KINDS = {"weight": "F32", "exp_avg": "F32"}
WRITERS = 2


@pytest.fixture(autouse=True)
def _unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of these tests has to survive a power failure."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def values(step: int) -> dict[str, torch.Tensor]:
    """The state after a step."""
    return {"a": torch.arange(12.0).view(4, 3) + step, "b": torch.arange(5.0) * step}


def write_parts(run_dir: Path, step: int) -> Path:
    """Begin a checkpoint and write the files and records of two writers, each with about half of the elements."""
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    folder = commit.begin(run_dir, Index(TrainState(step), {}), commit.new_attempt(), WRITERS)
    for writer in range(WRITERS):
        own = {"a": (6 * writer, 6), "b": (3 * writer, 3 - writer)}
        parts = [Part(n, tuple(v.shape), tuple((0, s) for s in v.shape), *own[n], 512, KINDS) for n, v in values(step).items()]
        contents = [values(step)[part.name].flatten()[part.start : part.start + part.count].numpy() for part in parts]
        written = write(folder / save.file_name(writer), parts, lambda number, _, contents=contents: [contents[number].data])
        write_record(folder, writer, [written])
    return folder


def save_step(run_dir: Path, step: int, keep: int = 2) -> None:
    """Save a step as the processes of a job do, one after the other."""
    write_parts(run_dir, step)
    commit.commit(run_dir)
    catalog.prune(run_dir, keep)


def full(run_dir: Path, step: int) -> Path:
    """Save full weights in one process."""
    weights = [Fragment(Piece(name, tuple(v.shape)), 0, dict.fromkeys(KINDS, v.flatten())) for name, v in values(step).items()]
    return save.save_full(run_dir, Index(TrainState(step), {}), iter(weights), 10)


def start(run_dir: Path) -> int:
    """The step from which the next job continues."""
    with ExitStack() as claims:
        path = run_directory.claim(run_dir, CheckpointConfig(), claims, 10)[0]
    assert path is not None
    return native.step_of(path)


def steps(run_dir: Path) -> list[int]:
    """The complete checkpoints, the newest of which has all bytes and values; nothing else is in the folder."""
    complete = native.complete(run_dir)
    newest = complete[-1]
    index = native.read_index(newest)
    assert verify.verify(newest) == []
    assert all(torch.equal(Checkpoint(newest).tensor(name), value) for name, value in values(index.train_state.step).items())
    assert {path.name for path in newest.iterdir()} == {native.INDEX, native.PARTS, *(entry.name for entry in index.files)}
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {catalog.CATALOG, *(folder.name for folder in complete)}
    return [native.step_of(folder) for folder in complete]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A run directory with the checkpoints of steps 2 and 3; the first one was removed."""
    for step in (1, 2, 3):
        save_step(tmp_path / "two", step)
    assert steps(tmp_path / "two") == [2, 3]
    return tmp_path / "two"


def changes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The changes of files by which step 4 is saved."""
    return faulty_disk.count(monkeypatch, lambda: save_step(run_dir, 4))


def last_record(made: list[str]) -> int:
    """The number of the call by which the last record appears: before are those of the draft, the catalog and the other record."""
    return [number for number, name in enumerate(made, 1) if name == "replace"][1 + WRITERS]


def test_a_kill_at_any_change_of_a_file_loses_nothing(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start finds the last checkpoint, finishes the new one once its records are there, and leaves nothing else."""
    made = changes(Path(shutil.copytree(two, tmp_path / "counted")), monkeypatch)
    assert len(made) > last_record(made) > 20
    for number in range(1, len(made) + 1):
        run_dir = Path(shutil.copytree(two, tmp_path / f"{number}"))
        assert faulty_disk.kill_at(monkeypatch, number, lambda run_dir=run_dir: save_step(run_dir, 4))
        newest = start(run_dir)
        found = steps(run_dir)
        assert found[-1] == newest == (4 if number > last_record(made) else 3), (number, made[number - 1])
        assert found in ([2, 3], [2, 3, 4], [3, 4]), (number, made[number - 1])
        save_step(run_dir, 5)
        assert catalog.listed(run_dir) == catalog.read(run_dir).complete == [newest, 5], (number, made[number - 1])


@pytest.mark.long
@pytest.mark.parametrize("at", ["records", "index", "renamed"])
def test_a_kill_while_an_interrupted_commit_is_finished(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """The save is killed when the records, the index or the folder are there, and then the next start at any change of a file."""
    made = changes(Path(shutil.copytree(two, tmp_path / "counted")), monkeypatch)
    renamed = made.index("rename") + 1  # the first folder that is renamed is the new one
    number = {"records": last_record(made) + 1, "index": renamed, "renamed": renamed + 1}[at]
    assert faulty_disk.kill_at(monkeypatch, number, lambda: save_step(two, 4))
    for after in itertools.count(1):
        run_dir = Path(shutil.copytree(two, tmp_path / f"{after}"))
        killed = faulty_disk.kill_at(monkeypatch, after, lambda run_dir=run_dir: start(run_dir))
        assert start(run_dir) == 4, after
        assert steps(run_dir) == [2, 3, 4], after
        if not killed:
            break
    assert after > 10


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "record": (lambda folder: (folder / "record-00001.json").unlink(), r"1 of 2 records are missing, the first is that of writer 1"),
    "torn record": (lambda folder: _cut(folder / "record-00001.json", 9), r"record-00001\.json"),
    "flipped byte": (
        lambda folder: _flip(folder / "rank-00001.safetensors"),
        r"weight of a, elements 6 to 11 of 12: other bytes than were",
    ),
    "truncated": (lambda folder: _cut(folder / "rank-00001.safetensors", 8), r"rank-00001\.safetensors: has \d+ bytes, expected \d+"),
    "file": (lambda folder: (folder / "rank-00001.safetensors").unlink(), r"elements 6 to 11 of 12: cannot be read: No such file"),
    "draft": (lambda folder: (folder / "draft.json").unlink(), r"draft\.json"),
}


def _cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def _flip(path: Path) -> None:
    """Change a bit of the second writer's part of weight a."""
    content = bytearray(path.read_bytes())
    content[content.index(values(4)["a"].numpy().tobytes()[24:36])] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_attempt_is_removed_with_its_reason(two: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    spoil, said = DAMAGES[damage]
    spoil(write_parts(two, 4))
    with caplog.at_level(logging.WARNING):
        assert start(two) == 3
    assert re.search(said, caplog.text)
    assert "removed the incomplete checkpoint of step 4 of an earlier job" in caplog.text
    assert steps(two) == [2, 3]


@pytest.mark.parametrize("calls", [1, pytest.param(10**9, marks=pytest.mark.long)], ids=["one call", "until the end"])
def test_a_full_disk_at_any_call_fails_the_save_alone(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """The checkpoints before are found, the next save succeeds without a new start, and nothing else is left."""
    for number in itertools.count(1):
        run_dir = Path(shutil.copytree(two, tmp_path / f"{number}"))
        with faulty_disk.full_disk(monkeypatch, number, number + calls - 1) as made:
            try:
                save_step(run_dir, 4)
                failed = False
            except OSError:
                failed = True
                with contextlib.suppress(OSError):
                    commit.abandon(run_dir)
        if len(made) < number:
            break
        newest = native.step_of(native.complete(run_dir)[-1])
        assert newest in ((3, 4) if failed else (4,)), (number, made[number - 1])
        save_step(run_dir, 5)  # which finds step 4 if its folder has its name and the catalog does not have it
        assert steps(run_dir) in ([newest, 5], [4, 5]), (number, made[number - 1])
    assert number > 20


def test_a_full_disk_while_one_process_writes_full_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, record, rows, index and catalog: the message names the run directory, and the next attempt succeeds."""
    full(tmp_path / "run", 1)
    counted = Path(shutil.copytree(tmp_path / "run", tmp_path / "counted"))
    with faulty_disk.full_disk(monkeypatch, 10**9, 10**9) as made:
        full(counted, 2)
    complete: list[int] = []
    for number in range(1, len(made) + 1):
        run_dir = Path(shutil.copytree(tmp_path / "run", tmp_path / f"{number}"))
        code = errno.EDQUOT if number % 2 else errno.ENOSPC
        with contextlib.suppress(UserError), faulty_disk.full_disk(monkeypatch, number, 10**9, code):
            full(run_dir, 2)
            complete.append(number)
        assert native.step_of(native.complete(run_dir)[0]) == 1
        full(run_dir, 2)
        start(run_dir)
        assert steps(run_dir) == [1, 2], (number, made[number - 1])
    assert len(complete) < 3 < 15 < len(made), "all but the last calls are needed"
    with (
        pytest.raises(UserError, match=f"run_dir={re.escape(str(run_dir))}: the checkpoint could not be written: .Errno 122. Disk quota"),
        faulty_disk.full_disk(monkeypatch, len(made) // 2, 10**9, errno.EDQUOT),
    ):
        full(run_dir, 3)


def test_records_that_do_not_hold_every_element_are_refused(tmp_path: Path) -> None:
    folder = write_parts(tmp_path, 2)
    content = checked_json.read(folder / "record-00001.json")
    content["rows"]["count"][0] -= 1
    checked_json.write(folder / "record-00001.json", content)
    with pytest.raises(ValueError, match="a: its parts have 11 of 12 elements"):
        commit.commit(tmp_path)


def test_a_file_that_is_removed_before_the_commit_is_missed(two: Path) -> None:
    """Also if its record is there."""
    (write_parts(two, 4) / "rank-00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"rank-00000\.safetensors was written, and is gone"):
        commit.commit(two)
    assert native.complete(two)[-1].name == "step-00000003"


def test_what_late_writers_of_failed_saves_write_is_removed_and_what_early_ones_write_is_not(two: Path) -> None:
    """A rank does not wait for the commit: it may write its part of the next checkpoint before this one begins to be committed."""
    late, early = (commit.partial_folder(two, step, commit.new_attempt()) for step in (3, 5))
    for folder in (late, early):
        folder.mkdir()
    save_step(two, 4)
    assert not late.exists()
    early.rmdir()
    assert steps(two) == [3, 4]


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


TORN = ["", "{}", '{"format": 2', "\xff", '{"format": 2, "complete": [1], "pending": null, "xxh3": "0"}', "[]", '{"complete": 3}']


@pytest.mark.parametrize("content", [None, *TORN])
def test_a_run_directory_without_a_readable_catalog_is_listed(two: Path, caplog: pytest.LogCaptureFixture, content: str | None) -> None:
    path = two / "checkpoints" / catalog.CATALOG
    path.unlink() if content is None else path.write_text(content, encoding="latin-1")
    (two / "checkpoints" / "step-00000009").mkdir()
    assert [native.step_of(folder) for folder in native.complete(two)] == [2, 3]
    assert ("catalog.json is not readable" in caplog.text) == (content is not None)
    assert start(two) == 3
    save_step(two, 4)
    assert catalog.read(two) == catalog.Catalog([3, 4])


def test_a_checkpoint_copied_by_hand_is_found(two: Path, tmp_path: Path) -> None:
    """Beside others, and in a new run directory; one without an index is not complete."""
    save_step(tmp_path / "other", 7)
    source = native.folder_of(tmp_path / "other", 7)
    shutil.copytree(source, native.folder_of(two, 7))
    shutil.copytree(source, native.folder_of(two, 9), ignore=lambda *_: ["index.json"])
    assert start(two) == 7
    assert [native.step_of(folder) for folder in native.complete(two)] == [2, 3, 7]
    shutil.copytree(source, native.folder_of(tmp_path / "new", 7))
    assert start(tmp_path / "new") == 7


def test_a_checkpoint_removed_by_hand_is_not_found(two: Path) -> None:
    shutil.rmtree(native.folder_of(two, 3))
    assert start(two) == 2
    save_step(two, 3)
    save_step(two, 4)
    assert catalog.read(two).complete == steps(two) == [3, 4]


def test_a_checkpoint_that_is_removed_while_others_read_it_is_no_damage(two: Path) -> None:
    folder = native.complete(two)[0]
    save_step(two, 4)
    for read in (native.read_index, lambda path: checkpoint_selection.settings_of(path, Evaluate(), {})):
        with pytest.raises(UserError, match=r"step-00000002: does not exist; .*checkpoint\.keep"):
            read(folder)


def test_a_lost_index_is_reported_by_every_start(two: Path) -> None:
    """The checkpoint stays the newest one; whoever reads it is told."""
    folder = native.folder_of(two, 3)
    (folder / native.INDEX).unlink()
    for _ in range(2):
        assert start(two) == 3
        assert catalog.read(two).complete == [2, 3]
        with pytest.raises(UserError, match=r"step-00000003/index.json: is missing\n.*checkpoint.skip_damaged"):
            native.read_index(native.find(two, "latest"))


def test_a_torn_catalog_of_a_killed_writer_is_removed_by_the_next_save(two: Path) -> None:
    torn = two / "checkpoints" / f".{catalog.CATALOG}.4242.partial"
    torn.write_text('{"format"')
    save_step(two, 4)
    assert not torn.exists()
    assert steps(two) == [3, 4]


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


def test_a_failure_is_known_without_space_for_its_reason(tmp_path: Path) -> None:
    """The process that commits must not wait for a writer of another node that has failed on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        assert commit.write_failure(tmp_path, 1, "No space left on device")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert commit.missing(tmp_path, 2) == ([0, 1], {1: "it has failed, and could not write why: the disk is full"})
    commit.write_failure(tmp_path, 1, "Disk quota exceeded")
    assert commit.missing(tmp_path, 2) == ([0, 1], {1: "Disk quota exceeded"})


def test_a_run_directory_that_is_renamed_is_not_created_again(tmp_path: Path) -> None:
    """A user who moves it back would else move it into the new one, and the next start would find no checkpoint."""
    run_dir = tmp_path / "run"
    save_step(run_dir, 1)
    folder = write_parts(run_dir, 2)
    index = native.read_index(folder, commit.DRAFT)
    run_dir.rename(tmp_path / "moved")
    writes: list[Callable[[], object]] = [
        lambda: commit.begin(run_dir, index, "other", WRITERS),
        lambda: catalog.write(run_dir, catalog.Catalog([1])),
        lambda: write_record(folder, 0, []),
        lambda: native.write_index(folder, index),
    ]
    for write_again in writes:
        with pytest.raises(OSError, match="No such file or directory"):
            write_again()
    assert not run_dir.exists()
    (tmp_path / "moved").rename(run_dir)
    assert commit.commit(run_dir) == native.folder_of(run_dir, 2)
