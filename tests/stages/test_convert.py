"""stage=convert on the command line, with checkpoints written by stage=pretrain."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.checkpoint.reader import Checkpoint, find
from pipeline.models import config_classes, registry
from tests.helpers import pipeline

pytestmark = pytest.mark.world

RUNS = {
    "gpt": (
        1,
        ("model=gpt-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn_hidden=64", "precision=bf16"),
    ),
    # The tied embedding is on two pipeline ranks, in two pieces of unequal size.
    "gpt-sharded": (
        4,
        (
            *("model=gpt-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn_hidden=64", "precision=fp32"),
            *("parallel.tensor=2", "parallel.pipeline=2", "model.vocab_size=301"),
        ),
    ),
    "llama-sharded": (
        4,
        (
            *("model=llama-tiny", "model.layers=3", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn_hidden=48"),
            *("precision=fp32", "parallel.tensor=2", "parallel.zero_stage=3"),
        ),
    ),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param("gpt", marks=pytest.mark.long), "gpt-sharded", pytest.param("llama-sharded", marks=pytest.mark.long)],
)
def run_dir(request, tmp_path_factory, tokens, tokenizer) -> Path:
    """A run of three steps."""
    ranks, overrides = RUNS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    pipeline(
        *(
            "stage=pretrain",
            "model.vocab_size=300",
            *overrides,
            f"run_dir={folder}",
            f"data.tokens={tokens}",
            f"tokenizer.path={tokenizer}",
        ),
        *("training.steps=3", "training.sequence_length=32", "training.micro_batch_size=2", "training.global_batch_size=8"),
        *("optimizer.warmup_steps=1", "optimizer.lr=0.01", "tracking=disabled", "training.validation_batches=1"),
        ranks=ranks if ranks > 1 else 0,
    )
    return folder


def test_the_exported_model_equals_the_trained_one(run_dir, tokenizer):
    convert = ("stage=convert", f"run_dir={run_dir}", f"tokenizer.path={tokenizer}")
    pipeline(*convert)
    checkpoint = Checkpoint(find(run_dir, "latest"))
    config = config_classes.from_dict(checkpoint.config["model"])
    ours = registry.build(config)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(checkpoint.tensor(name))
    stock, report = AutoModelForCausalLM.from_pretrained(run_dir / "hf", output_loading_info=True)
    assert not any(report.values())
    text = AutoTokenizer.from_pretrained(run_dir / "hf")
    ids = text("Tännchen grün winter", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), stock(ids).logits, rtol=1e-5, atol=1e-5)
    manifest = json.loads((run_dir / "hf" / "manifest.json").read_text())
    assert manifest["totals"] == {"step": 3, "parameters": sum(p.numel() for p in ours.parameters())}


@pytest.mark.parametrize("run_dir", ["gpt"], indirect=True)
def test_a_second_convert(run_dir, tokenizer):
    """With the same settings there is nothing to do; different settings are refused; another output folder is written."""
    convert = ("stage=convert", f"run_dir={run_dir}", f"tokenizer.path={tokenizer}", f"stage.output={run_dir / 'twice'}")
    pipeline(*convert)
    written = (run_dir / "twice" / "model.safetensors").stat().st_mtime_ns
    assert "nothing to do" in pipeline(*convert)
    assert "stage.dtype=bf16" in pipeline(*convert, "stage.dtype=bf16", expect=2)
    assert (run_dir / "twice" / "model.safetensors").stat().st_mtime_ns == written
    pipeline(*convert[:-1], "stage.dtype=bf16", f"stage.output={run_dir / 'small'}", "stage.shard_gigabytes=0.00002")
    assert len(list((run_dir / "small").glob("*.safetensors"))) > 1
    small, full = (AutoModelForCausalLM.from_pretrained(run_dir / name).state_dict() for name in ("small", "twice"))
    assert all(torch.equal(small[key], value.bfloat16()) for key, value in full.items())


def test_errors_are_reported_before_anything_is_written(tmp_path, tokenizer):
    text = pipeline("stage=convert", f"run_dir={tmp_path}", f"tokenizer.path={tmp_path / 'none'}", expect=2)
    assert "2 problems" in text
    assert "run stage=pretrain with" in text
    assert "run stage=train_tokenizer with" in text
    text = pipeline("stage=convert", f"stage.checkpoint={tmp_path}", f"tokenizer.path={tokenizer}", "stage.dtype=fp8", expect=2)
    assert "stage.dtype=fp8" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run_dir", ["gpt"], indirect=True)
def test_refusals(run_dir, tokenizer, tmp_path):
    convert = ("stage=convert", f"run_dir={run_dir}")
    larger = tmp_path / "larger"
    shutil.copytree(tokenizer, larger)
    described = json.loads((larger / "tokenizer.json").read_text())
    described["added_tokens"].append({**described["added_tokens"][0], "id": 5000, "content": "<|more|>"})
    (larger / "tokenizer.json").write_text(json.dumps(described))
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "thesis.tex").write_text("text")
    text = pipeline(*convert, f"tokenizer.path={larger}", f"stage.output={occupied}", expect=2)
    assert "exceeds model.vocab_size=300 of the checkpoint" in text
    assert "contains files that stage=convert did not write" in text
    assert (occupied / "thesis.tex").exists()
    text = pipeline(*convert, f"tokenizer.path={tokenizer}", "tokenizer.end_of_document=END", expect=2)
    assert "<|endoftext|>" in text

    damaged = tmp_path / "damaged"
    shutil.copytree(find(run_dir, "latest"), damaged)
    file = next(damaged.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 0xFF  # the first byte of a weight
    file.write_bytes(content)
    text = pipeline(
        "stage=convert", f"stage.checkpoint={damaged}", f"tokenizer.path={tokenizer}", f"stage.output={tmp_path / 'hf'}", expect=2
    )
    assert file.name in text
    assert "differs from its checksum" in text
    assert not (tmp_path / "hf").exists()
