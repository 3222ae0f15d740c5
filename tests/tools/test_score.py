"""tools/score: its scores are those of the stock classes, from an export and from a checkpoint, and stage=shard starts it."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from pipeline.common.errors import UserError
from pipeline.models.families.bert import BertConfig
from pipeline.models.families.llama import LlamaConfig
from tests.conversion.test_huggingface_export import export, random_model
from tests.data.test_clean import clean, config
from tests.helpers import ROOT, load_tool
from tests.training import one_rank
from tests.training.test_classification import WORDS, write_tokenizer

LABELS = ["bad", "fair", "good"]
CLASSIFIER = BertConfig(layers=2, hidden=32, heads=2, ffn_hidden=64, vocab_size=24, max_positions=16).classifier(LABELS)
DECODER = LlamaConfig(layers=2, hidden=32, heads=2, kv_heads=2, ffn_hidden=64, vocab_size=300, max_positions=32)
#: Shorter and longer than a sequence, without an own batch, and empty.
TEXTS = ["a film was superb", "boring " * 40, "the end", "", "Märchen [SEP] 日本 " * 6, "is"]


def exported(folder: Path, settings: BertConfig | LlamaConfig) -> Path:
    """Write a random model with its tokenizer."""
    if isinstance(settings, BertConfig):
        write_tokenizer(folder.parent / "tokenizer")
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(TEXTS * 5, trainer)
        (folder.parent / "tokenizer").mkdir()
        tokenizer.save(str(folder.parent / "tokenizer/tokenizer.json"))
    return export(folder, random_model(settings), settings, folder.parent / "tokenizer")


def test_a_classifier_gives_the_probability_of_a_label(tmp_path, monkeypatch):
    tool, folder = load_tool("score"), exported(tmp_path / "hf", CLASSIFIER)
    one_rank.run("convert", tmp_path / "run", f"stage.input={folder}")
    stock, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    plain = [text.replace("[SEP]", "[ SEP ]") for text in TEXTS]  # text that spells a special token is text
    with torch.no_grad():
        logits = [stock(**tokenizer(text, return_tensors="pt", truncation=True, max_length=16)).logits[0] for text in plain]
    expected = torch.stack(logits).softmax(dim=1)[:, 2].tolist()
    assert max(expected) - min(expected) > 0.01, "differences would not show"
    monkeypatch.setattr(tool, "BATCH_TOKENS", 40)  # several batches
    for path in (folder, tmp_path / "run"):
        assert tool.Scorer(path, "good")(TEXTS) == pytest.approx(expected, abs=1e-5)
    for path, label, said in (
        (folder, "best", r"--label=best: is no label of .*\n.*choose one of bad, fair, good"),
        (folder, None, "--label=None: is no label of"),
        (tmp_path, "good", "RUN=.*contains no checkpoint"),
    ):
        with pytest.raises(UserError, match=said):
            tool.Scorer(path, label)


def test_a_decoder_gives_bits_per_byte(tmp_path, monkeypatch):
    """Every token is predicted once, the first of a window from the one before it."""
    tool, folder = load_tool("score"), exported(tmp_path / "hf", DECODER)
    one_rank.run("convert", tmp_path / "run", f"stage.input={folder}", "training.sequence_length=24")
    stock, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))

    def bits_per_byte(text: str, length: int) -> float:
        ids, nats = [tokenizer.token_to_id("<|endoftext|>"), *tokenizer.encode(text).ids], 0.0
        for start in range(0, len(ids) - 1, length):
            window = torch.tensor([ids[start : start + length + 1]])
            with torch.no_grad():
                logits = stock(window[:, :-1]).logits[0]
            nats += float(F.cross_entropy(logits, window[0, 1:], reduction="sum"))
        return nats / math.log(2) / max(1, len(text.encode()))

    monkeypatch.setattr(tool, "BATCH_TOKENS", 50)
    for path, length in ((folder, 32), (tmp_path / "run", 24)):
        expected = [bits_per_byte(text, length) for text in TEXTS]
        assert tool.Scorer(path, None)(TEXTS) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(UserError, match=r"--label=good: is no label of .*\n.*remove it: the score of a decoder"):
        tool.Scorer(folder, "good")


def test_stage_shard_starts_it(tmp_path):
    """More text than a pipe holds."""
    folder = exported(tmp_path / "hf", CLASSIFIER)
    texts = [" ".join(WORDS[number % 7 :][: number % 5 + 1] * 40) for number in range(500)]
    expected = load_tool("score").Scorer(folder, "good")(texts)
    median = sorted(expected)[250]
    command = f"{sys.executable} {ROOT}/tools/score {folder} --label good"
    kept, _ = clean(texts, config("score", score={"command": command, "least": median}))
    assert [text is not None for text in kept] == [score >= median for score in expected]


@pytest.fixture
def standard_input() -> Iterator[None]:
    """A test may replace file descriptor 0."""
    own = os.dup(0)
    yield
    os.dup2(own, 0)
    os.close(own)


@pytest.mark.usefixtures("standard_input")
def test_lines_of_standard_input(tmp_path, capsys):
    """A last line without an end, and texts that are cut; what is no line with a text ends it."""
    tool, folder = load_tool("score"), exported(tmp_path / "hf", CLASSIFIER)

    def scored(lines: str, *more: str) -> tuple[int, list[float], str]:
        """The exit code, the scores, and what is said of lines on standard input."""
        (tmp_path / "lines").write_text(lines)
        with open(tmp_path / "lines") as file:
            os.dup2(file.fileno(), 0)
            code = tool.main([str(folder), "--label", "good", *more])
        said = capsys.readouterr()
        return code, [json.loads(line)["score"] for line in said.out.splitlines()], said.err

    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:3])
    code, scores, _ = scored(lines[:-1])
    assert (code, scores) == (0, pytest.approx(tool.Scorer(folder, "good")(TEXTS[:3]), abs=1e-6))
    code, (first, second), _ = scored('{"text": "film boring"}\n{"text": "film"}', "--characters=4")
    assert (code, first) == (0, second)
    code, _, said = scored('{"txt": "a"}\n')
    assert code == 2
    assert 'standard input=b\'{"txt": "a"}\': is no line with a text' in said
