"""The tiny model of every decoder family learns at the command line, in one process; other architectures have separate tests."""

import pytest

from tests.helpers import pipeline
from tests.training import one_rank

MODELS = ("deepseek-tiny",)
MORE = ("opt-tiny", "gemma3-tiny", "gpt1-tiny", "bloom-tiny", "mistral-tiny", "apertus-tiny", "mixtral-tiny")


@pytest.mark.parametrize("model", [*MODELS, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_a_tiny_model_learns(model, tokens, tmp_path):
    pipeline(
        "stage=pretrain",
        f"model={model}",
        "model.layers=2",
        f"data.tokens={tokens}",
        f"run_dir={tmp_path}",
        "training.steps=8",
        "training.sequence_length=32",
        "training.global_batch_size=8",
        "training.micro_batch_size=4",
        "optimizer.warmup_steps=2",
        "optimizer.lr=0.003",
        "parallel.zero_stage=0",
        "tracking=disabled",
        "precision=fp32",
    )
    lines = one_rank.lines(tmp_path)
    assert list(lines) == list(range(1, 9))
    assert lines[8]["loss"] < lines[1]["loss"] - 0.5
    if model in ("mixtral-tiny", "deepseek-tiny"):
        assert all(line["router_entropy"] > 0 for line in lines.values())
