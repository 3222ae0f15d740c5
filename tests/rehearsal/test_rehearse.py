"""stage=rehearse: what it refuses, the interpreter that it chooses, and a rehearsal with a CUDA build of torch where there is one."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.checkpoint import native
from pipeline.checkpoint.saver import SyncSaver
from pipeline.config.layout import Layout
from pipeline.parallel import mesh as meshes
from pipeline.planner.plan import hardware_of, plan
from pipeline.rehearsal import rehearse as rehearsal
from pipeline.rehearsal import start
from pipeline.rehearsal.observed import RECORDED
from pipeline.rehearsal.rehearse import RandomTokens
from pipeline.training.trainer import Trainer
from tests.helpers import one_in, python
from tests.world import configured

JOB = (
    *("stage=rehearse", "cluster.hardware=h100", "model=llama-tiny", "stage.world_size=16", "parallel.tensor=2", "parallel.pipeline=2"),
    *("training.sequence_length=64", "training.micro_batch_size=2", "training.global_batch_size=32", "training.compile=off"),
)


@pytest.fixture
def rehearse(call_main, tmp_path):
    """`rehearse(*overrides)`: the exit code of the command line, and what it printed."""
    return lambda *overrides: call_main(*overrides, f"run_dir={tmp_path}")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("cluster.hardware=null",), "cluster.hardware=None: is required"),
        (("stage.rank=16",), "stage.rank=16: must be less than the world size 16"),
        (("parallel.tensor=3",), "parallel.tensor"),
        (("stage.world_size=6",), "world size"),
        (("stage.python=/nowhere/python",), "stage.python=/nowhere/python: must be a Python interpreter whose torch is a CUDA build"),
    ],
    ids=["no GPU", "no such rank", "an illegal layout", "an illegal world size", "no interpreter"],
)
def test_refusals(rehearse, overrides: tuple[str, ...], said: str) -> None:
    code, printed = rehearse(*JOB, *overrides)
    assert code == 2
    assert said in printed
    assert "fix: " in printed


def test_without_a_cuda_build_it_says_what_still_works(rehearse, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(start, "CUDA_ENVIRONMENT", tmp_path)
    monkeypatch.setattr(start, "cuda_version", lambda _: None)
    code, printed = rehearse(*JOB)
    assert code == 2
    for part in ("tools/install --cuda", "stage.python", "dry_run=true and stage=plan work"):
        assert part in printed


@pytest.mark.parametrize(
    ("here", "environment", "chosen"),
    [("13.0", "13.0", sys.executable), (None, "13.0", ".venv-cuda/bin/python")],
    ids=["this", "installed"],
)
def test_choice_of_the_interpreter(monkeypatch, here: str | None, environment: str | None, chosen: str) -> None:
    monkeypatch.setattr(start, "cuda_version", lambda path: here if path == Path(sys.executable) else environment)
    assert str(start.choose(None)).endswith(chosen)


@pytest.mark.parametrize("model", ["llama-tiny", "bert-tiny", "t5-tiny"])
def test_random_tokens_are_those_of_the_objective(model: str) -> None:
    config = configured("stage=pretrain", f"model={model}", "training.sequence_length=16", "training.global_batch_size=4")
    arrays = RandomTokens(config).arrays(np.arange(3))
    assert arrays["tokens"].shape == arrays["targets"].shape == (3, 16)
    assert ("decoder_tokens" in arrays) == (model == "t5-tiny")
    assert 0 <= arrays["tokens"].min() <= arrays["tokens"].max() < config.model.vocab_size


@pytest.mark.parametrize("model", one_in(3, ["llama-tiny", "bert-tiny", "t5-tiny"]))
def test_the_loop_of_a_rehearsal_trains_validates_and_saves_on_a_cpu(model: str, tmp_path: Path) -> None:
    meshes.init_distributed(0, 1, 0, "")
    try:
        sizes = ("training.sequence_length=16", "training.global_batch_size=4", "training.micro_batch_size=2", "parallel.zero_stage=0")
        config = configured("stage=pretrain", f"model={model}", *sizes)
        own = Trainer(config, meshes.build_mesh(Layout.of(config, 1), torch.device("cpu")))
        with closing(SyncSaver(tmp_path, "rank")) as saver:
            (tmp_path / "checkpoints").mkdir()
            rehearsal._train(config, own, RandomTokens(config), saver, steps=2, folder=tmp_path)
    finally:
        meshes.destroy_process_group()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 2 + RECORDED + 2))
    assert lines[-1]["validation_data"] == "random"
    assert [folder.name for folder in native.complete(tmp_path)] == [f"step-{2 + RECORDED:08d}", f"step-{3 + RECORDED:08d}"]


def cuda_python() -> str:
    """The interpreter of an environment with a CUDA build; skips the test without one."""
    named = os.environ.get("TANNSCHEN_CUDA_PYTHON", str(start.CUDA_ENVIRONMENT / "bin/python"))
    if start.cuda_version(Path(named)) is None:
        pytest.skip(f"{named} has no CUDA build of torch: tools/install --cuda, or TANNSCHEN_CUDA_PYTHON")
    return named


@pytest.fixture(scope="module")
def cuda_cache(tmp_path_factory) -> dict[str, str]:
    """The folder of the compiled driver, which the tests of this module share."""
    return {"TANNSCHEN_CACHE": str(tmp_path_factory.mktemp("cache"))}


def test_a_rehearsed_rank(tmp_path: Path, cuda_cache: dict[str, str]) -> None:
    words = (*JOB, "stage.steps=2", f"stage.python={cuda_python()}", f"run_dir={tmp_path}")
    code, printed = python("-m", "pipeline", *words, cold=True, env=cuda_cache)
    assert code == 0, printed
    written = json.loads((tmp_path / "rehearsal.json").read_text())
    config = configured(*JOB)
    layout, planned = Layout.of(config, 16), plan(config, 16, hardware_of(config))
    assert written["job"]["coordinates"]["pipeline"] == planned.estimate.pipeline_rank
    moments = {moment["name"]: moment for moment in written["memory"]["moments"]}
    assert list(moments) == ["start", "forward", "backward", "optimizer", "save", "validation"]
    assert moments["start"]["allocated"] < moments["forward"]["allocated"] <= moments["backward"]["peak"] <= moments["backward"]["reserved"]
    kinds = written["memory"]["kinds"]
    assert kinds["optimizer"]["rehearsed"] == pytest.approx(planned.estimate.memory.optimizer, rel=0.02)
    # Four micro-batches, each with a state to the other stage and a gradient back.
    found = {(entry["axis"], entry["name"]): entry for entry in written["collectives"]}
    assert layout.micro_batches == found["pipeline", "send"]["count"] == found["pipeline", "receive"]["count"] == 4
    state = 2 * 64 // 2 * config.model.hidden * 2
    assert found["pipeline", "send"]["bytes"] == 4 * state
    assert found["data", "reduce_scatter"]["beside"]
    assert written["launches"]["step"]["products"] > written["launches"]["block_forward"]["products"] > 0
    assert written["steps"]["waits"] == []
    assert len(written["steps"]["step_seconds"]) == 3  # one more while the checkpoint is copied


def test_a_rank_that_does_not_fit(tmp_path: Path, cuda_cache: dict[str, str]) -> None:
    large = (
        "stage=rehearse",
        "cluster.hardware=a100-40",
        "model=llama-tiny",
        "stage.world_size=2",
        "training.compile=off",
        "stage.steps=1",
    )
    words = (*large, "training.sequence_length=64", "training.global_batch_size=131072", "training.micro_batch_size=65536")
    code, printed = python("-m", "pipeline", *words, f"stage.python={cuda_python()}", f"run_dir={tmp_path}", cold=True, env=cuda_cache)
    assert code == 1, printed
    assert "rank 0 does not fit: CUDA out of memory" in printed
    assert "training.micro_batch_size=32768" in printed
    assert json.loads((tmp_path / "rehearsal.json").read_text())["memory"]["fits"] is False
