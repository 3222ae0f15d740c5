"""certify.required: a job starts with a certificate of its configuration, ranks, code version and data only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.common.errors import UserError
from pipeline.launch import certified
from tests.world import configured

SETTINGS = ("model=llama-tiny", "training.global_batch_size=16", "training.micro_batch_size=2", "training.sequence_length=64")


@pytest.fixture
def job(tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch):
    """`job(*settings)` checks a job of 8 ranks; a certificate of SETTINGS is in its run directory."""
    monkeypatch.setattr(certified, "commit", lambda: "abc")
    given = (*SETTINGS, f"run_dir={tmp_path}", f"data.tokens={tokens}")
    planned = configured("stage=certify", *given)
    content: dict[str, Any] = {
        "certified": True,
        "planned": {"world_size": 8, "config": dataclasses.asdict(planned)},
        "commit": "abc",
        "data": certified.data_of(planned),
    }
    path = tmp_path / certified.FILE

    def check(*settings: str, world_size: int = 8, skip: tuple[str, ...] = (), **changed: Any) -> None:
        content["planned"]["config"]["stage"]["skip"] = skip
        path.write_text(json.dumps(content | changed))
        certified.check(configured("stage=pretrain", "certify.required=true", *given, *settings), world_size)

    return check


def test_a_valid_certificate(job) -> None:
    job()
    job("training.timeout_minutes=5", "tracking=disabled")


@pytest.mark.parametrize(
    "settings, more, expected",
    [
        (("optimizer.lr=0.01",), {}, "optimizer.lr=0.01, certified with 0.0003"),
        (("parallel.tensor=2",), {}, "parallel.tensor=2, certified with 1"),
        ((), {"world_size": 16}, "it is about 8 ranks, the job has 16"),
        ((), {"commit": "def"}, "it is of commit def, the code is abc"),
        ((), {"certified": False}, "it says that the job is not certified"),
        ((), {"data": {}}, "was not there or not checked"),
        ((), {"skip": ("state", "data")}, "it was written with stage.skip=[state,data]"),
        ((), {"planned": 3}, "is not readable as a certificate"),
    ],
)
def test_a_certificate_of_another_job(job, settings: tuple[str, ...], more: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=r"certify\.required=True") as refused:
        job(*settings, **more)
    assert expected in str(refused.value)


def test_no_certificate(tmp_path: Path) -> None:
    config = configured("stage=pretrain", *SETTINGS, f"run_dir={tmp_path}", "certify.required=true")
    with pytest.raises(UserError, match="is not there"):
        certified.check(config, 8)


def test_uncommitted_code(job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "commit", lambda: "abc-dirty")
    with pytest.raises(UserError, match="uncommitted changes"):
        job(commit="abc-dirty")
