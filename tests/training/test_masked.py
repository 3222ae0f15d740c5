"""Masked language models at the command line: a run whose loss decreases, evaluation, and refusals. Layouts: test_layouts.py."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

from pipeline.config import command_line, compose
from pipeline.config.rules import check
from pipeline.data.load.objectives.masked import Masked
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.special_tokens import SpecialTokens
from tests.helpers import pipeline, run_ranks, with_stage
from tests.training import one_rank
from tests.world import configured


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "model, kind",
    [("bert-tiny", "bert"), *(pytest.param(f"{name}-tiny", "roberta", marks=pytest.mark.long) for name in ("roberta", "modernbert"))],
)
def test_pretraining_learns_and_evaluates_alike(shards, tmp_path, model, kind):
    paths = (f"tokenizer.path={tmp_path}/tokenizer", f"data.tokens={tmp_path}/tokens", f"data.shards={shards}")
    common = (*paths, f"tokenizer={kind}", f"run_dir={tmp_path}/run", f"model={model}", "model.vocab_size=520", "model.hidden=64")
    common += ("model.layers=2", "model.heads=4")
    run = (
        "model.ffn_hidden=128",
        "training.sequence_length=48",
        "training.global_batch_size=16",
        "precision=fp32",
        "parallel.zero_stage=0",
    )
    more = ("training.steps=40", "optimizer.lr=0.003", "optimizer.warmup_steps=5", "tracking=disabled")
    one_rank.run("train_tokenizer", tmp_path / "run", *common, "tokenizer.vocab_size=520", "tokenizer.report=false")
    one_rank.run("tokenize", tmp_path / "run", *common)
    pipeline("stage=pretrain", *common, *run, *more)
    found = lines(tmp_path / "run")
    losses = [line["loss"] for line in found if "loss" in line]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert found[-1]["bits_per_byte"] is None
    one_rank.run("evaluate", tmp_path / "run", *common, *run, *more, "stage.batches=8")
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluation["validation_loss"] == pytest.approx(found[-1]["validation_loss"], rel=1e-5)
    assert evaluation["bits_per_byte"] is None
    ranks = 2 if kind == "bert" else 1
    few = ("stage.batches=1", "training.global_batch_size=4", "training.micro_batch_size=2")
    run_ranks(ranks, "stage=evaluate", *common, *run, *more, *few, "stage.pseudo_perplexity=true", f"parallel.tensor={ranks}")
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    one_rank.run("convert", tmp_path / "run", *common)
    compose.register()
    found, composed = compose.diagnose(command_line.parse(with_stage([*common, *run, *more])))
    assert not found
    expected = pseudo_perplexity(tmp_path / "run/hf", compose.to_run_config(composed), 4)
    assert evaluation["pseudo_perplexity"] == pytest.approx(expected, rel=1e-4)


def pseudo_perplexity(export, config, count):
    """A plain loop over the tokens of validation sequences with the stock class."""
    data = Masked.open_validation(config)
    arrays = data.arrays(data.validation_sample(count))
    tokens = torch.tensor(np.where(arrays["targets"] == IGNORE, arrays["tokens"], arrays["targets"]).astype(np.int64))
    text = AutoTokenizer.from_pretrained(export)
    special = set(SpecialTokens(Path(config.tokenizer.path), data.samples.corpora[0].totals["tokenizer"]).ids.values())
    mask = text.convert_tokens_to_ids("[MASK]" if config.model.family == "bert" else "<mask>")
    architecture = json.loads((export / "config.json").read_text())["architectures"][0]
    stock = getattr(transformers, architecture).from_pretrained(export).eval()
    total, number = 0.0, 0
    for row, sequence in enumerate(tokens):
        inputs = {} if config.model.family != "bert" else {"token_type_ids": torch.tensor(arrays["segments"][row : row + 1]).long()}
        if "documents" in arrays:
            inputs["attention_mask"] = torch.tensor(arrays["documents"][row : row + 1] >= 0).long()
        for position, token in enumerate(sequence.tolist()):
            if token in special:
                continue
            masked = sequence.clone()
            masked[position] = mask
            with torch.no_grad():
                found = stock(masked[None], **inputs)
            logits = found.prediction_logits if hasattr(found, "prediction_logits") else found.logits
            total -= float(logits[0, position].log_softmax(0)[token])
            number += 1
    return math.exp(total / number)


def test_settings_that_a_masked_model_does_not_support_are_refused():
    words = ("data.masking.random=0.7", "data.masking.keep=0.7", "data.infill.rate=0.5", "training.document_mask=true")
    config = configured("stage=pretrain", "model=bert-tiny", *words, "training.sequence_warmup=[{until_step:2,value:64}]")
    said = "\n".join(str(violation) for violation in check.violations(config, 1))
    for key in ("data.masking.random=0.7", "data.infill.rate=0.5", "training.document_mask=True", "training.sequence_warmup"):
        assert key in said
