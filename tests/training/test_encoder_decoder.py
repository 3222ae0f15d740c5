"""Encoder-decoders at the command line: the loss decreases, the export equals the trained model, missing inputs are reported early."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from pipeline.common.errors import UserError
from pipeline.config.rules import check
from tests.data.test_encoder_decoder import with_pad  # noqa: F401 - a fixture
from tests.helpers import pipeline
from tests.training import one_rank
from tests.world import configured

SMALL = (
    "stage=pretrain",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.ffn_hidden=64",
    "model.vocab_size=310",
    "precision=fp32",
    "parallel.zero_stage=0",
    "training.sequence_length=32",
    "training.micro_batch_size=8",
    "training.global_batch_size=16",
    "optimizer.lr=0.01",
    "optimizer.warmup_steps=5",
    "training.validation_batches=2",
    "tracking=disabled",
)
NUMBERS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs"}


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in one_rank.lines(run_dir).values()]


def numbers(path: Path, seed: int) -> Path:
    """Write a file of pairs: numbers in English and German."""
    chance = random.Random(seed)
    words = [[chance.choice(list(NUMBERS)) for _ in range(chance.randint(1, 4))] for _ in range(300)]
    path.write_text("".join(f"{' '.join(w)}\t{' '.join(NUMBERS[n] for n in w)}\n" for w in words), encoding="utf-8")
    return path


@pytest.mark.long
def test_t5_learns_to_fill_spans(with_pad, tmp_path):  # noqa: F811 - the fixture
    paths = (f"data.tokens={with_pad}/tokens", f"tokenizer.path={with_pad}/tokenizer", f"run_dir={tmp_path}/run")
    pipeline(*SMALL, "model=t5-tiny", "model.head_width=8", *paths, "training.steps=30")
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 1
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation_loss"] < found[0] - 1
    assert last["bits_per_byte"] is None, "the loss does not cover all tokens of the text"


def test_a_transformer_learns_to_translate_and_is_exported(with_pad, tmp_path):  # noqa: F811 - the fixture
    files = (f"data.pairs.train=[{numbers(tmp_path / 'a.tsv', 0)}]", f"data.pairs.validation=[{numbers(tmp_path / 'b.tsv', 1)}]")
    paths = (f"tokenizer.path={with_pad}/tokenizer", f"run_dir={tmp_path}/run")
    pipeline(*SMALL, "model=transformer-tiny", *files, *paths, "training.steps=40")
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] / 2
    one_rank.run("convert", tmp_path / "run", *paths[:1])
    stock = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "hf").eval()
    text = AutoTokenizer.from_pretrained(tmp_path / "run" / "hf")
    assert stock.config.decoder_start_token_id == text.convert_tokens_to_ids("<pad>"), "as in training"
    source = torch.tensor([[*text("one two three")["input_ids"], text.eos_token_id]])
    target = torch.tensor([[*text("eins zwei drei")["input_ids"], text.eos_token_id]])
    with torch.no_grad():
        told = stock(input_ids=source, labels=target).loss.item()
        other = stock(input_ids=source, labels=target.flip(1)).loss.item()
    assert told < 2 < other


def test_missing_inputs_are_reported_before_training(tokens, tokenizer, tmp_path):
    common = ("pretrain", tmp_path / "run", *SMALL[1:], f"data.tokens={tokens}", f"tokenizer.path={tokenizer}")
    with pytest.raises(UserError, match="<extra_id_0>"):
        one_rank.run(*common, "model=t5-tiny", "model.layers=2")
    with pytest.raises(UserError, match="3 problems") as raised:
        one_rank.run(*common, "model=transformer-tiny", "training.document_mask=true", "data.packing=best_fit")
    for key in ("data.pairs.train", "training.document_mask", "data.packing"):
        assert key in str(raised.value)
    with pytest.raises(UserError, match=r"data.decoder_start"):
        one_rank.run(*common, "model=transformer-tiny", f"data.pairs.train=[{numbers(tmp_path / 'a.tsv', 0)}]")
    assert not (tmp_path / "run").exists()


def test_incompatible_settings_are_refused():
    with pytest.raises(UserError) as raised:
        check.check(configured("stage=pretrain", "model=t5-tiny", "data.spans.sentinel='<id>'", "parallel.context=2"), 2)
    assert "data.spans.sentinel" in str(raised.value)
    assert "parallel.context" in str(raised.value)
