"""tools/ladder on run directories with planted losses: the left-out error, the settings of a large run, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from pipeline.common.errors import UserError
from pipeline.config import ladder
from pipeline.models import registry
from tests.world import configured
from tools.audit.scaling_law import Law

LAW = Law(1.8, 500.0, 0.35, 2000.0, 0.36)


@pytest.fixture
def tool(call_tool) -> Callable[..., tuple[int, str]]:
    return partial(call_tool, "ladder")


def write(
    folder: Path,
    layers: int,
    *,
    width: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    factor: float = 1.0,
    done: float = 1.0,
    validated: bool = True,
    vocabulary: int = 512,
    family: str = "llama",
    optimizer: str = "adamw",
    experts: dict[str, int] | None = None,
) -> None:
    """A run of the ladder whose losses are those of LAW times a factor, killed after a share of its steps."""
    heads = (hidden := width or 64 * layers) // 64
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn_hidden": 176 * heads,
        **(experts or {"head_width": None}),
    }
    count = ladder.weights(sizes)
    batch = batch or ladder.sequences(count, 2048)
    steps = ladder.steps(20 * count, batch, 2048)
    run = folder / str(width or layers)
    run.mkdir(parents=True)
    config = {
        "model": {"family": family, "vocab_size": vocabulary, **sizes},
        "training": {"steps": steps, "sequence_length": 2048, "global_batch_size": batch},
        "optimizer": {"name": optimizer, "decay_ends": [steps // 4, steps // 2], "lr": lr or ladder.lr(count)},
        "data": {"tokens": "work/tokens", "blend": {}},
        "tokenizer": {"path": "work/tokenizer"},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    for step in (steps // 4, steps // 2, steps):
        if step <= done * steps:
            tokens = step * batch * 2048
            lines.append({"step": step, "tokens": tokens, "loss": 9.0})
            lines += [{"step": step, "validation_loss": factor * LAW.loss(count, tokens)}] * validated
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_ladder_predicts_its_largest_size_and_a_large_run(tool, tmp_path):
    for layers in (4, 6, 8, 12):
        write(tmp_path, layers)
    code, said = tool(tmp_path, "--flops", "1e20")
    assert code == 0, said
    assert "size that was left out: 0.00 %" in said
    assert said.count("left out\n") == 3, "the three horizons of the largest size"
    weights, tokens = LAW.optimum(1e20)
    assert f"N = {weights:.4g} weights and D = {tokens:.4g} tokens" in said
    layers = int(said.partition("model.layers=")[2].split()[0])
    own = layers * (4 * (64 * layers) ** 2 + 3 * 64 * layers * 176 * layers)
    assert own == pytest.approx(weights, rel=0.15), "the closest whole number of layers"
    budget = int(said.partition("token_budget=")[2].split()[0])
    assert 6 * own * budget == pytest.approx(1e20, rel=1e-3), "the FLOPs are those asked for"
    assert f"optimizer.lr={ladder.lr(own):g}" in said
    assert "law without the largest size" in (tmp_path / "ladder.html").read_text()


def test_a_large_run_has_the_shape_the_batch_and_the_rate_of_the_runs(tool, tmp_path):
    """One depth, batch and rate (muP) for all widths. A rate that follows no rule is not extrapolated."""
    for width in (256, 384, 512, 768):
        write(tmp_path / "same", 4, width=width, batch=16, lr=0.004)
        write(tmp_path / "other", 4, width=width, batch=16, lr=1 / width)
    code, said = tool(tmp_path / "same", "--flops", "1e18")
    assert code == 0, said
    assert "model.layers=4 " in said
    hidden = int(said.partition("model.hidden=")[2].split()[0])
    assert hidden % 128 == 0
    weights, _ = LAW.optimum(1e18)
    assert (hidden - 128) ** 2 < weights / (4 * (4 + 3 * 176 / 64)) < (hidden + 128) ** 2
    assert "training.global_batch_size=16 training.steps=" in said
    assert "optimizer.lr=0.004\n" in said
    assert "optimizer.lr=choose it: those of the runs are neither equal nor of the ladder's formula" in tool(tmp_path / "other")[1]


@pytest.mark.long
def test_a_largest_size_that_does_not_fit_ends_in_1(tool, tmp_path):
    for layers in (4, 6, 8, 12):
        write(tmp_path, layers, factor=1.05 if layers == 12 else 1.0)
    code, said = tool(tmp_path)
    assert code == 1
    assert "left out: 4.76 % (aim: 2 %)" in said
    assert "does not predict the largest size within 2 %: no settings of a large run are printed" in said
    assert "FLOPs: lowest predicted loss" not in said
    assert tool(tmp_path, "--aim", "5")[0] == 0


@pytest.mark.long
def test_a_ladder_of_models_with_experts(tool, tmp_path):
    """The law is one of the weights of a token; weights are those of the model; experts may be fine-grained."""
    for layers in (4, 6, 8, 12):
        write(tmp_path / "runs", layers, family="mixtral", experts={"experts": 8, "top_k": 2})
    code, said = tool(tmp_path / "runs", "--flops", "1e20")
    assert code == 0, said
    assert "size that was left out: 0.00 %" in said
    of_token, total = re.search(r"\(([\d.e+]+) weights of a token, about ([\d.e+]+) with all experts", said).groups()
    sizes = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "ffn_hidden": 176 * 12, "experts": 8, "top_k": 2}
    assert float(total) / float(of_token) == pytest.approx(ladder.weights(sizes, of_token=False) / ladder.weights(sizes), rel=1e-3)
    experts = ("model=mixtral-tiny", "model.layers=2", "model.experts=8", "model.top_k=4", "model.ffn_hidden=${ladder:ffn_hidden,0.5}")
    model = configured("stage=pretrain", "experiment=ladder", *experts).model
    assert (model.hidden, model.ffn_hidden) == (128, 192)
    some_blocks = ("model=qwen3-moe-tiny", "model.layers=5", "model.experts=8", "model.top_k=4", "model.dense_blocks=[1]")
    for sizes in (model, configured("stage=pretrain", *some_blocks).model):
        matrices = [weight for name, weight in registry.build(sizes).blocks.named_parameters() if weight.dim() > 1]
        assert ladder.weights(vars(sizes), of_token=False) == sum(weight.numel() for weight in matrices)
        assert ladder.weights(vars(sizes)) == sum(weight.numel() // (2 if weight.dim() == 3 else 1) for weight in matrices)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "3 runs of 3 sizes: a fit without the largest size requires 4 sizes"),
        ({8: {"done": 0.5}}, r"/8: is at step [\d,]+ of [\d,]+; submit the same command again"),
        ({8: {"validated": False}}, r"/8: no validation loss at step [\d,]+, the end of a decay; train it with a training.validate_every"),
        ({8: {"vocabulary": 1024}}, "model.vocab_size: the runs have 1024, 512; one law does not hold for all of them"),
        ({8: {"optimizer": "lion"}}, "optimizer.name: the runs have adamw, lion; one law does not hold for all of them"),
        ({8: {"family": "gpt"}}, "/8: is of model.family=gpt, and weights are counted for llama, mixtral, qwen3_moe"),
        ({8: {"family": "mixtral", "experts": {"experts": 8, "top_k": 2}}}, "model.family: the runs have llama, mixtral; one law does not"),
    ],
    ids=["two sizes", "not finished", "not validated", "other vocabulary", "other optimizer", "other family", "experts"],
)
def test_runs_that_allow_no_fit_are_refused(tool, tmp_path, changes, message):
    for layers in (4, 6, 12, *changes):
        write(tmp_path, layers, **changes.get(layers, {}))
    code, said = tool(tmp_path)
    assert code == 2
    (line,) = [line for line in said.splitlines() if "error:" in line]
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.layers=0",), "model.layers=0: must be at least 1"),
        (
            ("model=olmoe-tiny",),
            "model.family=olmoe: the weights of a ladder (experiment=ladder) are counted for model.family=llama, mixtral, qwen3_moe",
        ),
        (("training.token_budget=${ladder:tokens,abc}",), "ladder:tokens=abc: must be a number"),
        (("training.steps=${ladder:step}",), "ladder=step: must be one of hidden, ffn_hidden, tokens, batch, lr, steps"),
    ],
)
def test_a_ladder_without_sizes_is_refused_in_one_message(settings, message):
    with pytest.raises(UserError) as refused:
        configured("stage=pretrain", "experiment=ladder", *settings)
    assert message in str(refused.value)


def test_a_folder_without_runs_is_refused(tool, tmp_path):
    code, said = tool(tmp_path)
    assert code == 2
    assert "no run directories; name those of experiment=ladder" in said
