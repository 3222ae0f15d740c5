"""tools/gpu_kernels: what a block launches on a GPU, forward and backward; the counts are a contract."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.rehearsal import start
from tests.helpers import ROOT
from tests.rehearsal import test_contract

#: Weights of a block of Llama: the gradient of each is added to its bucket by one kernel.
WEIGHTS = {
    *("attention_norm", "attention.query", "attention.key", "attention.value", "attention.output"),
    *("mlp_norm", "mlp.gate", "mlp.up", "mlp.down"),
}
MODELS = "llama3-8b,mixtral-8x7b,gemma3-270m"
#: What torchtitan's Llama block launches: generated kernels and matrix products, forward and backward.
PLAIN = {"generated": (6, 10), "product": (7, 14), "attention": (1, 1)}


def test_mistakes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "tools/gpu_kernels"))["main"]
    for words, message in (
        (["--hardware", "h101"], "--hardware=h101: must be one of"),
        (["--model", "llama9-8b"], "Could not find 'model/llama9-8b'"),
        (["parallel.tensor=2"], "must be divisible by parallel.tensor=2"),
        (["training.nothing=1"], "Could not override 'training.nothing'"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    if start.cuda_version(Path(sys.executable)) is None:
        assert main(["--python", sys.executable]) == 2
        error = capsys.readouterr().err
        assert f"--python={sys.executable}: must be a Python interpreter whose torch is a CUDA build" in error
        assert "tools/install --cuda" in error


@pytest.fixture(scope="module")
def blocks(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Model -> name of a block -> its passes on an H100."""
    folder = tmp_path_factory.mktemp("gpu_kernels")
    command = [
        "tools/gpu_kernels",
        "--model",
        "llama3-8b,mixtral-8x7b,gemma3-270m",
        "--hardware",
        "h100",
        "--json",
        str(folder / "out.json"),
    ]
    variables = {**os.environ, "TANNSCHEN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, *command, "--python", str(test_contract.PYTHON.absolute())]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    content = json.loads((folder / "out.json").read_text())["models"]
    return {model: {block["name"]: block for block in by_gpu["h100"]} for model, by_gpu in content.items()}


def counts(block: dict[str, Any], kind: str) -> tuple[int, int]:
    """Launches of a kind, forward and backward."""
    return block["forward"]["counts"][kind], block["backward"]["counts"][kind]


def spills(block: dict[str, Any]) -> dict[str, int]:
    """Generated kernel -> its spilled registers, of those that spill."""
    kernels = [kernel for part in ("forward", "backward") for kernel in block[part]["generated"]]
    assert all(0 < kernel["registers"] <= 255 for kernel in kernels)
    return {kernel["name"]: kernel["spills"] for kernel in kernels if kernel["spills"]}


@pytest.mark.long
@test_contract.pytestmark[0]
@test_contract.pytestmark[1]
def test_a_llama_block_launches_no_more_than_a_plain_one(blocks: dict[str, dict[str, Any]]) -> None:
    ours, plain = blocks["llama3-8b"]["block 0"], blocks["llama3-8b"]["plain block"]
    assert {kind: counts(plain, kind) for kind in PLAIN} == PLAIN
    assert (counts(plain, "other"), counts(plain, "gradient")) == ((0, 0), (0, 0))
    for kind, (forward, backward) in PLAIN.items():
        assert counts(ours, kind)[0] <= forward, kind
        assert counts(ours, kind)[1] <= backward, kind
    assert counts(ours, "other") == (0, 0)
    added = [launch["name"] for launch in ours["backward"]["launches"] if launch["kind"] == "gradient"]
    assert sorted(added) == sorted(f"blocks.0.{name}.weight" for name in WEIGHTS)
    for block in (ours, plain):
        assert block["forward"]["waits"] == block["backward"]["waits"] == {}
        assert spills(block) == {}
        for part in ("forward", "backward"):
            found = block[part]
            assert found["products"] == found["counts"]["product"]
            assert sum(found["names"].values()) == found["kernels"]
            names = {name: number for name, number in found["names"].items() if name.startswith("triton_")}
            assert names == {kernel["name"]: kernel["launches"] for kernel in found["generated"]}, "as the driver saw them"
    assert 1e-3 < ours["forward"]["seconds"] < ours["backward"]["seconds"] < 2e-2


@pytest.mark.long
@test_contract.pytestmark[0]
@test_contract.pytestmark[1]
def test_a_moe_block_launches_few_kernels(blocks: dict[str, dict[str, Any]]) -> None:
    (block,) = blocks["mixtral-8x7b"].values()
    assert sum(block["forward"]["counts"].values()) <= 30
    assert sum(block["backward"]["counts"].values()) <= 55
    assert block["forward"]["waits"] == block["backward"]["waits"] == {}
    assert spills(block) == {}
    assert {launch["name"] for launch in block["forward"]["launches"] if launch["kind"] == "other"} == {"aten::sort.stable"}


@pytest.mark.long
@test_contract.pytestmark[0]
@test_contract.pytestmark[1]
def test_blocks_with_a_window_take_a_mask_that_was_made_outside(blocks: dict[str, dict[str, Any]]) -> None:
    local, full = (blocks["gemma3-270m"][name] for name in ("block 0", "block 5"))
    for block in (local, full):
        assert counts(block, "attention") == (1, 1)
        assert counts(block, "other")[0] == 0
    assert counts(local, "generated")[0] <= counts(full, "generated")[0] + 1, "no search for blocks of the mask"
    (flex,) = (launch["name"] for launch in local["forward"]["launches"] if launch["kind"] == "attention")
    assert "flex_attention" in flex
