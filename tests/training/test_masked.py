"""Masked language models at the command line: a run whose loss decreases, evaluation, and refusals. Layouts: test_layouts.py."""

import json

import pytest

from tests.helpers import pipeline


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("model, kind", [("bert-tiny", "bert"), ("roberta-tiny", "roberta")])
@pytest.mark.slow
def test_pretraining_learns_and_evaluates_alike(shards, tmp_path, model, kind):
    paths = (f"tokenizer.path={tmp_path}/tokenizer", f"data.tokens={tmp_path}/tokens", f"data.shards={shards}")
    common = (*paths, f"tokenizer={kind}", f"run_dir={tmp_path}/run", f"model={model}", "model.vocab_size=520", "model.hidden=64")
    run = (
        "model.ffn_hidden=128",
        "training.sequence_length=48",
        "training.global_batch_size=16",
        "precision=fp32",
        "parallel.zero_stage=0",
    )
    more = ("training.steps=60", "optimizer.lr=0.003", "optimizer.warmup_steps=5", "tracking=disabled")
    pipeline("stage=train_tokenizer", *common, "tokenizer.vocab_size=520", "tokenizer.report=false")
    pipeline("stage=tokenize", *common)
    pipeline("stage=pretrain", *common, *run, *more)
    found = lines(tmp_path / "run")
    losses = [line["loss"] for line in found if "loss" in line]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert found[-1]["bits_per_byte"] is None
    pipeline("stage=evaluate", *common, *run, *more, "stage.batches=8")
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluation["validation_loss"] == pytest.approx(found[-1]["validation_loss"], rel=1e-5)
    assert evaluation["bits_per_byte"] is None


def test_settings_that_a_masked_model_does_not_support_are_refused():
    said = pipeline(
        "stage=pretrain",
        "model=bert-tiny",
        "data.masking.random=0.7",
        "data.masking.keep=0.7",
        "data.infill.rate=0.5",
        "training.document_mask=true",
        "training.sequence_warmup=[{until_step:2,value:64}]",
        expect=2,
    )
    for key in ("data.masking.random=0.7", "data.infill.rate=0.5", "training.document_mask=True", "training.sequence_warmup"):
        assert key in said
    assert "Traceback" not in said
