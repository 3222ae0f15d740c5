"""Faults at every single change of a file during a save: a kill, a full disk; and what the next start finds."""

import contextlib
import itertools
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint import catalog, commit, data_file, native, records, verify
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.parts import Part
from pipeline.common.errors import UserError
from pipeline.config.schema import CheckpointConfig
from pipeline.config.stages import Evaluate
from pipeline.evaluation import checkpoint_selection
from pipeline.training import run_directory
from tests.checkpoint import faulty_disk

KINDS = ("weight", "exp_avg", "exp_avg_sq")
WRITERS = 2


def save(run_dir: Path, step: int, keep: int = 2) -> None:
    """Save two weights of two writers as the processes of a job do, one after the other."""
    folder = commit.begin(run_dir, Index(TrainState(step=step), {}), commit.new_attempt(), WRITERS)
    for writer in range(WRITERS):
        parts = [
            Part(name, (8, 3), ((4 * writer, 4 * writer + 4), (0, 3)), 0, 12, 4096, dict.fromkeys(KINDS, "F32")) for name in ("a", "b")
        ]

        def read(part, kind, writer=writer):
            yield memoryview(np.full(12, 100 * step + 10 * writer + part + KINDS.index(kind) / 10, np.float32)).cast("B")

        written = data_file.write(folder / f"rank-{writer:05d}.safetensors", parts, read)
        records.write_record(folder, writer, [written])
    commit.commit(run_dir)
    catalog.prune(run_dir, keep)


def start(run_dir: Path) -> Path | None:
    """The checkpoint from which the next job continues."""
    with ExitStack() as claims:
        return run_directory.claim(run_dir, CheckpointConfig(), claims)[0]


def assert_whole(folder: Path) -> None:
    """Every byte is there and has its checksum, and nothing else is there."""
    assert verify.verify(folder) == []
    index = native.read_index(folder)
    assert {path.name for path in folder.iterdir()} == {native.INDEX, native.PARTS, *(entry.name for entry in index.files)}


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """The tests do not wait for a disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def three(tmp_path):
    """A run directory with checkpoints of steps 1 to 3, of which the first was removed."""
    for step in (1, 2, 3):
        save(tmp_path / "three", step)
    assert names(tmp_path / "three") == {"catalog.json", "step-00000002", "step-00000003"}
    return tmp_path / "three"


def last_record(made: list[str]) -> int:
    """The number of the call by which the last record appears: before are those of the draft, the catalog and the other record."""
    return [number for number, name in enumerate(made, 1) if name == "replace"][1 + WRITERS]


def test_a_kill_at_any_change_of_a_file_loses_nothing(three, tmp_path, monkeypatch):
    """The next start finds the last checkpoint, finishes the new one once its records are there, and leaves nothing else."""
    counted = shutil.copytree(three, tmp_path / "counted")
    made = faulty_disk.count(monkeypatch, lambda: save(counted, 4))
    for number in range(1, len(made) + 1):
        run_dir = shutil.copytree(three, tmp_path / f"{number}")
        assert faulty_disk.kill_at(monkeypatch, number, lambda run_dir=run_dir: save(run_dir, 4))
        newest = start(run_dir)
        assert newest in native.complete(run_dir)[-1:], number
        assert newest.name == ("step-00000004" if number > last_record(made) else "step-00000003"), (number, made[number - 1])
        for folder in native.complete(run_dir):
            assert_whole(folder)
        save(run_dir, 5)
        assert names(run_dir) == {"catalog.json", newest.name, "step-00000005"}, (number, made[number - 1])


def test_a_kill_during_the_next_start_loses_nothing(three, tmp_path, monkeypatch):
    """The start that finishes an interrupted commit is killed, too, at any change of a file."""
    counted = shutil.copytree(three, tmp_path / "counted")
    made = faulty_disk.count(monkeypatch, lambda: save(counted, 4))
    assert faulty_disk.kill_at(monkeypatch, last_record(made) + 1, lambda: save(three, 4))
    number, killed = 0, True
    while killed:
        number += 1
        run_dir = shutil.copytree(three, tmp_path / f"{number}")
        killed = faulty_disk.kill_at(monkeypatch, number, lambda run_dir=run_dir: start(run_dir))
        assert start(run_dir).name == "step-00000004", number
        assert_whole(run_dir / "checkpoints" / "step-00000004")
        assert names(run_dir) == {"catalog.json", "step-00000002", "step-00000003", "step-00000004"}, number
    assert number > 10


@pytest.mark.parametrize("calls", [1, 10**9], ids=["one call", "until the end"])
def test_a_full_disk_at_any_call_fails_the_save_alone(three, tmp_path, monkeypatch, calls):
    """The checkpoints before are found, the next save succeeds without a new start, and nothing else is left."""
    for number in itertools.count(1):
        run_dir = shutil.copytree(three, tmp_path / f"{number}")
        with faulty_disk.full_disk(monkeypatch, number, number + calls - 1) as made:
            try:
                save(run_dir, 4)
                failed = False
            except OSError:
                failed = True
                with contextlib.suppress(OSError):
                    commit.abandon(run_dir)
        if len(made) < number:
            break
        complete = native.complete(run_dir)
        assert complete[-1].name in ("step-00000003", "step-00000004"), (number, made[number - 1])
        for folder in complete:
            assert_whole(folder)
        assert failed or complete[-1].name == "step-00000004"
        save(run_dir, 5)
        found = names(run_dir)
        assert found in ({"catalog.json", f"step-0000000{step}", "step-00000005"} for step in (3, 4)), (number, made[number - 1], found)
    assert number > 20


@pytest.mark.parametrize(
    "content", ["", '{"format": 2', "\xff", '{"format": 2, "complete": [1], "pending": null, "xxh3": "0"}', "[]", '{"complete": 3}']
)
def test_a_torn_catalog_is_replaced_by_a_listing(three, content, caplog):
    (three / "checkpoints" / "catalog.json").write_text(content, encoding="latin-1")
    assert [folder.name for folder in native.complete(three)] == ["step-00000002", "step-00000003"]
    assert "catalog.json is not readable" in caplog.text
    assert start(three).name == "step-00000003"
    save(three, 4)
    assert catalog.read(three) == catalog.Catalog([3, 4])


def test_a_checkpoint_copied_by_hand_is_found(three, tmp_path):
    """Beside others, and in a new run directory; one without an index is not complete."""
    save(tmp_path / "other", 7)
    source = tmp_path / "other" / "checkpoints" / "step-00000007"
    shutil.copytree(source, three / "checkpoints" / "step-00000007")
    shutil.copytree(source, three / "checkpoints" / "step-00000009", ignore=lambda *_: ["index.json"])
    assert start(three).name == "step-00000007"
    assert native.complete(three)[-1].name == "step-00000007"
    shutil.copytree(source, tmp_path / "new" / "checkpoints" / "step-00000007")
    assert start(tmp_path / "new").name == "step-00000007"


def test_a_checkpoint_removed_by_hand_is_not_found(three):
    shutil.rmtree(three / "checkpoints" / "step-00000003")
    assert start(three).name == "step-00000002"
    save(three, 3)
    save(three, 4)
    assert catalog.read(three).complete == [3, 4]
    assert names(three) == {"catalog.json", "step-00000003", "step-00000004"}


@pytest.mark.parametrize("damage", ["flipped byte", "short file", "missing file", "torn record", "missing record"])
def test_an_interrupted_commit_with_damage_is_not_finished(three, monkeypatch, caplog, damage):
    made = faulty_disk.count(monkeypatch, lambda: save(three, 4))
    assert faulty_disk.kill_at(monkeypatch, last_record(made) + 1, lambda: save(three, 5))
    (partial,) = (three / "checkpoints").glob(".step-*.partial")
    file, record = partial / "rank-00001.safetensors", partial / "record-00001.json"
    content = bytearray(file.read_bytes())
    content[-200] ^= 1
    changes = {
        "flipped byte": lambda: file.write_bytes(content),
        "short file": lambda: file.write_bytes(content[:-1]),
        "missing file": file.unlink,
        "torn record": lambda: record.write_text(record.read_text()[:-9]),
        "missing record": record.unlink,
    }
    changes[damage]()
    assert start(three).name == "step-00000004"
    assert "removed the incomplete checkpoint of step 5" in caplog.text
    assert {"short file": "rank-00001.safetensors: has", "missing record": "that of writer 1"}.get(damage, "00001") in caplog.text
    assert names(three) == {"catalog.json", "step-00000003", "step-00000004"}


def test_what_late_writers_of_failed_saves_write_is_removed_and_what_early_ones_write_is_not(three):
    """A rank does not wait for the commit: it may write its part of the next checkpoint before this one begins to be committed."""
    late, early = (commit.partial_folder(three, step, commit.new_attempt()) for step in (3, 5))
    for folder in (late, early):
        folder.mkdir()
    save(three, 4)
    assert names(three) == {"catalog.json", "step-00000003", "step-00000004", early.name}


def test_a_checkpoint_that_is_removed_while_others_read_it_is_no_damage(three):
    folder = native.complete(three)[0]
    save(three, 4)
    for read in (native.read_index, lambda path: checkpoint_selection.settings_of(path, Evaluate(), {})):
        with pytest.raises(UserError, match=r"step-00000002/index.json: does not exist; .*checkpoint\.keep"):
            read(folder)


def test_a_file_that_is_removed_before_the_commit_is_missed(three, monkeypatch):
    """Also if its record is there."""
    write_record = records.write_record

    def remove_before(folder, writer, written):
        write_record(folder, writer, written)
        (folder / "rank-00000.safetensors").unlink(missing_ok=True)

    monkeypatch.setattr(records, "write_record", remove_before)
    with pytest.raises(ValueError, match=r"rank-00000\.safetensors was written, and is gone"):
        save(three, 4)
    assert native.complete(three)[-1].name == "step-00000003"
