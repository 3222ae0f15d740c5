"""Tokenization engines: the ids of the reference for every text, and an error if they differ."""

import json
import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config.data import TokenizerConfig
from pipeline.data.tokenize import encoders, tokenizer_training
from pipeline.data.tokenize.tokenizer import TextEncoder
from tests.data.library import here
from tests.helpers import words

EOD = "<|endoftext|>"
KINDS = {
    "gpt2": TokenizerConfig(),
    "llama3": TokenizerConfig(split="llama3"),
    "single digits": TokenizerConfig(digits="single", split="llama3"),
    "groups of digits": TokenizerConfig(digits="groups_of_three"),
    "runs": TokenizerConfig(whitespace="runs", special_tokens=["<|user|>", "<|tool_call|>"]),
}
#: Alphabets of a fuzz corpus: word boundaries, multi-byte characters and combining sequences. FUZZ adds long texts and special tokens.
ALPHABETS = [
    "aé ",
    "0123456789.,",
    " \t\n\r",
    "漢字仮名한국어ไทย",
    "🎄👩‍🇩🇪👍🏽\u200d\ufe0f",
    "\0\x01\x1b\x7f\x80\ufffd\U0010ffff",
    "'sdmtlvreSDMT ",
    "!?-_#{}<>|",
]
CHANCE = random.Random(7)
FUZZ = [
    *("".join(CHANCE.choice(alphabet) for _ in range(length)) for alphabet in ALPHABETS for length in (1, 2, 7, 100, 1000)),
    *("".join(CHANCE.choice(CHANCE.choice(ALPHABETS)) for _ in range(300)) for _ in range(100)),
    *(char * 50_000 for char in "a 漢7"),
    EOD, f"{EOD}{EOD}", f"x{EOD}y <|user|>\n<|tool_call|>", "<|endof text|>", "<|endoftext",
]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def reference(request, tmp_path_factory) -> TextEncoder:
    texts = [words(n, 300) + " def f(x):\n        return x  # 12345\n\n\n" + ALPHABETS[n % 8] for n in range(40)]
    model = tokenizer_training.train(lambda: texts, KINDS[request.param], 400)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_training.save(model, folder, EOD)
    return TextEncoder(folder, EOD)


@pytest.fixture(scope="module")
def engine(reference) -> encoders.Fastokens:
    return encoders.Fastokens(reference.path)


def test_fuzz(reference, engine):
    assert encoders.first_mismatch(engine, reference, FUZZ) is None
    assert encoders.first_mismatch(engine, reference, encoders.HARD_TEXTS) is None
    ids, lengths = engine.encode(FUZZ)
    assert len(lengths) == len(FUZZ)
    assert reference.end_of_document not in ids


@given(st.lists(st.text(max_size=60), max_size=8))
@settings(max_examples=60)
def test_any_text(reference, engine, texts):
    assert encoders.first_mismatch(engine, reference, texts) is None


@pytest.fixture
def other(tokenizer, tmp_path) -> TextEncoder:
    """A tokenizer whose file was changed after the reference loaded it: the engine loads no merges."""
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    encoder = TextEncoder(tmp_path, EOD)
    content["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return encoder


def test_different_ids_at_the_start(other, caplog):
    text = words(1, 50)
    with pytest.raises(UserError, match=r"tokenizer.engine=fastokens: returns different ids .*\n.*tokenizer.engine=huggingface"):
        encoders.choose("fastokens", other, lambda: [text])
    assert encoders.choose("auto", other, lambda: [text]) is other
    assert "fastokens returns different ids than Hugging Face tokenizers" in caplog.text
    assert encoders.choose("huggingface", other, list) is other


def test_different_ids_during_tokenization_raise(other):
    verified = encoders.VerifiedEncoder(encoders.Fastokens(other.path), other)
    document = words(1, 5000)
    verified.encode([document])
    with pytest.raises(UserError, match="returns different ids"):
        verified.encode([document] * (1 + encoders.CHECK_EVERY // len(document)))


def test_first_mismatch_returns_the_text_that_differs(other):
    assert encoders.first_mismatch(encoders.Fastokens(other.path), other, ["", "zz", "Tännchen Wald", "q"]) == "Tännchen Wald"


def test_what_fastokens_does_not_support(shards, tmp_path, caplog):
    model = tokenizer_training.train(lambda: [words(n, 300) for n in range(20)], TokenizerConfig(kind="wordpiece"), 600)
    tokenizer_training.save(model, tmp_path, EOD)
    settings = ("stage=tokenize", f"data.shards={shards}", f"tokenizer.path={tmp_path}", f"data.tokens={tmp_path}/t")
    assert "tokenizer.engine=fastokens: does not support" in here(*settings, "tokenizer.engine=fastokens", expect=2)
    caplog.set_level(logging.INFO)
    encoder = TextEncoder(tmp_path, EOD)
    assert encoders.choose("auto", encoder, list) is encoder
    assert "does not support this tokenizer (normalizer error" in caplog.text
