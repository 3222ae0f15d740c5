"""Errors that only one of several ranks reports, and those of a stage. What else is refused: test_command_line.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import pipeline, torchrun


def test_only_one_rank_reports_an_error(tmp_path: Path) -> None:
    message = pipeline("optimizer.lr=-1", f"run_dir={tmp_path}", ranks=2, expect=2)
    assert message.count("optimizer.lr=-1") == 1


@pytest.mark.long
def test_a_delayed_rank_0_reports_the_error(tmp_path: Path) -> None:
    """torchrun terminates all ranks when one has failed: the other ranks must not exit before rank 0 has reported the error."""
    late = ("sh", "-c", '[ "$RANK" = 1 ] || sleep 1; exec "$@"', "late")
    message = pipeline("optimizer.lr=-1", f"run_dir={tmp_path}", prefix=torchrun(2, *late), expect=1)
    assert message.count("optimizer.lr=-1") == 2, "by a rank, and at the end of torchrun's own lines"


@pytest.mark.long
def test_an_error_that_rank_0_does_not_find_is_reported(tmp_path: Path) -> None:
    elsewhere = ("sh", "-c", '[ "$RANK" = 1 ] || exec sleep 100; exec "$@"', "elsewhere")
    message = pipeline("optimizer.lr=-1", f"run_dir={tmp_path}", prefix=torchrun(2, *elsewhere), expect=1)
    assert message.count("optimizer.lr=-1") == 2, "by a rank, and at the end of torchrun's own lines"


def test_inconsistent_launcher_variables(tmp_path: Path) -> None:
    broken = {"RANK": "4", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    message = pipeline(f"run_dir={tmp_path / 'run'}", expect=2, env=broken)
    assert "rank 4 of 2" in message
    assert "Traceback" not in message


def test_an_error_of_a_stage_is_not_explained_by_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It passes unchanged. The option of this group is in a folder that the explanation of a command line does not read."""
    from hydra.core.global_hydra import GlobalHydra

    from pipeline import __main__, stages

    def fail(*_: object) -> None:
        raise ValueError("a defect of the stage")

    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntraining: {steps: 3}\n")
    monkeypatch.setattr(stages, "run", fail)
    monkeypatch.chdir(tmp_path)
    for arguments in (["stage=shard"], [f"--config-dir={tmp_path}", "stage=shard", "experiment=mine"]):
        monkeypatch.setattr("sys.argv", ["pipeline", *arguments, "data.input=[x]", f"run_dir={tmp_path}/run"])
        with pytest.raises(ValueError, match="a defect of the stage"):
            __main__.run_hydra(arguments)
        GlobalHydra.instance().clear()
