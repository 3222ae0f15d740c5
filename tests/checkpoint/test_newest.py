"""The newest checkpoint of a run that trains is removed while others read it: they read the next one, in every command that reads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checkpoint import catalog, native
from pipeline.checkpoint.newest import RETRIES, read_newest
from pipeline.checkpoint.range_reader import RangeReader
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import UserError
from tests.checkpoint import small_checkpoints
from tests.tools.test_checkpoint import tool  # noqa: F401 (a fixture)


def save(run_dir: Path, step: int) -> Path:
    """What a run with checkpoint.keep=1 does after a step."""
    folder = small_checkpoints.write(run_dir, small_checkpoints.state(step), step)
    catalog.prune(run_dir, 1)
    return folder


@pytest.fixture(params=["index", "tensors"])
def train_on(request, monkeypatch) -> Callable[[Callable[[], object]], None]:
    """Makes a function run once when a reader is about to read the index, or the tensors, of a checkpoint that it has chosen."""
    owner, name = {"index": (native, "read_index"), "tensors": (RangeReader, "read")}[request.param]
    original = getattr(owner, name)

    def arm(train: Callable[[], object]) -> None:
        def read(*arguments, **options):
            monkeypatch.setattr(owner, name, original)
            train()
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, read)

    return arm


def test_a_run_that_trains_on_is_read_at_its_newest_checkpoint(tmp_path):
    save(tmp_path, 1)

    def read(folder: Path, seen: list[int]) -> float:
        seen.append(native.step_of(folder))
        if len(seen) <= RETRIES:
            save(tmp_path, native.step_of(folder) + 1)
        return float(Checkpoint(folder).tensor("b.bias")[0])

    seen: list[int] = []
    expected = small_checkpoints.state(RETRIES + 1)["b.bias"]["weight"][0]
    assert read_newest(lambda: [native.find(tmp_path, "latest")], lambda folder: read(folder, seen)) == expected
    assert seen == list(range(1, RETRIES + 2))


def test_one_that_is_always_removed_and_a_named_one_are_refused_with_advice(tmp_path):
    save(tmp_path, 1)

    of_two: list[Path] = []

    def read(folder: Path, *seen: list[Path]) -> None:
        for folders in seen:
            folders.append(folder)
        save(tmp_path, native.step_of(folder) + 1)
        native.read_index(folder)

    named = native.find(tmp_path, "latest")
    for find in (lambda: [native.find(tmp_path, "latest")], lambda: [named]):
        with pytest.raises(UserError, match=r"step-\d+: does not exist; the job of a run removes .*\n.*tools/checkpoint keep"):
            read_newest(find, read)
    with pytest.raises(UserError, match="does not exist"):
        read_newest(lambda: [native.find(tmp_path, "latest")], lambda folder: read(folder, of_two), ranks=2)
    assert len(of_two) == 1, "the other rank does not begin again"


def test_damage_is_no_removal(tmp_path):
    folder = save(tmp_path, 1)
    (folder / "rank-00000.safetensors").unlink()
    with pytest.raises(UserError, match=r"rank-00000.safetensors.*\n.*checkpoint.skip_damaged"):
        read_newest(lambda: [native.find(tmp_path, "latest")], lambda path: Checkpoint(path).tensor("a.weight"))


def test_commands_read_the_newest_one(tool, tmp_path, train_on):  # noqa: F811
    """A step that is named is not replaced by another one."""
    save(tmp_path, 1)
    other = small_checkpoints.write(tmp_path / "other", small_checkpoints.state(), 9)
    train_on(lambda: save(tmp_path, 2))
    code, text = tool("diff", tmp_path, other, "--read")
    assert code == 1
    assert "A: " + str(catalog.folder_of(tmp_path, 2)) in text
    train_on(lambda: save(tmp_path, 3))
    code, text = tool("diff", other, tmp_path / "step-2", "--read")
    assert code == 2
    assert re.search(r"step-00000002: does not exist; the job of a run removes .*\n.*tools/checkpoint keep", text)
    assert "skip_damaged" not in text


def test_inspect_and_verify_read_the_newest_one(tool, tmp_path, monkeypatch):  # noqa: F811
    save(tmp_path, 1)
    original, begun = native.read_index, []

    def read(folder: Path, *more: str):
        if not begun:
            begun.append(folder)
            save(tmp_path, 2)
        return original(folder, *more)

    monkeypatch.setattr(native, "read_index", read)
    code, text = tool("inspect", tmp_path, "--norms")
    assert (code, text.splitlines()[0]) == (0, str(catalog.folder_of(tmp_path, 2)))
    shutil.rmtree(tmp_path)
    save(tmp_path, 1)
    begun.clear()
    code, text = tool("verify", tmp_path)
    assert code == 0
    assert f"{catalog.folder_of(tmp_path, 1)}: was removed by its run meanwhile" in text
