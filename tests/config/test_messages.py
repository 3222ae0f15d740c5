"""Error messages: all violations in one message with key, value, rule and fix; exit code 2; no traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import pipeline, torchrun


def refused(tmp_path: Path, *arguments: str) -> str:
    """Run a command that must be refused without writing files, and return its message."""
    message = pipeline(*arguments, f"run_dir={tmp_path / 'run'}", expect=2)
    assert "Traceback" not in message
    assert "fix:" in message
    assert not (tmp_path / "run" / "config.yaml").exists()
    return message


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["stage=plan", "stage.table=rows.csv"], ["stage.table=rows.csv", "is no longer a key", "tools/plan_table ROWS.csv OUT.csv"]),
        (["training.steps=0"], ["training.steps=0", "must be at least 1"]),
        (["training.epochs=2"], ["training.epochs=2.0", "is read by stage=finetune only", "set training.steps"]),
        (["stage=evaluate", "stage.apply_chat_template=true"], ["stage.apply_chat_template=True", "is read with stage.tasks only"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_one_violation(arguments: list[str], said: list[str], tmp_path: Path) -> None:
    message = refused(tmp_path, *arguments)
    for text in said:
        assert text in message


#: Overrides that do not compose -> what is said of them.
NOT_COMPOSED = {
    "optimizr.lr=1": "no such key\n    fix: did you mean optimizer.lr",
    "parallel.tensr=2": "no such key\n    fix: did you mean parallel.tensor",
    "training.steps=many": "Value 'many' of type 'str' could not be converted to Integer",
    "model=lama-tiny": r"must be one of .*\n    fix: did you mean model=llama-tiny",
    "stage=pretrian": r"must be one of .*\n    fix: did you mean stage=pretrain",
    "data.instructions.truncate=true": "is no longer a key\n    fix: set data.instructions.too_long to truncate, drop or refuse",
    "optimizer.lr=1e-4,3e-4": "contains several values\n    fix: add -m",
}


def test_several_overrides_that_do_not_compose(tmp_path: Path) -> None:
    message = refused(tmp_path, *NOT_COMPOSED, "parallel.tensor=1")
    assert message.startswith("7 problems")
    for override, said in NOT_COMPOSED.items():
        assert re.search(f"- {re.escape(override)}: {said}", message), message
    assert "parallel.tensor=1" not in message


def test_several_values_out_of_range(tmp_path: Path) -> None:
    wrong = {
        "optimizer.lr=-1": "must be above 0",
        "parallel.zero_stage=4": "must be at least 0 and at most 3",
        "training.micro_batch_size=0": "must be at least 1",
        "parallel.schedule=gpipe": "must be one of 1f1b, interleaved, zbv",
    }
    message = refused(tmp_path, *wrong, "optimizer.beta2=0.9")
    assert message.startswith("4 problems")
    for override, said in wrong.items():
        assert re.search(f"{override}(.0)?: {said}", message), message
    assert "optimizer.beta2" not in message


def test_several_invalid_combinations(tmp_path: Path) -> None:
    message = refused(tmp_path, "parallel.tensor=3", "parallel.pipeline=64", "training.sequence_length=100000")
    assert int(re.match(r"(\d+) problems", message)[1]) >= 3
    for text in ("parallel.tensor=3: must divide model.heads", "model.layers=4", "world size"):
        assert text in message


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


def test_help_lists_stages_and_keys() -> None:
    text = pipeline("--help")
    for word in (
        "stage=shard",
        "stage=convert",
        "parallel.zero_stage=1",
        "at most 3",
        "cluster=alps|devcluster|",
        "model=",
        "training.steps=1000",
    ):
        assert word in text
    assert "\x1b" not in text


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
