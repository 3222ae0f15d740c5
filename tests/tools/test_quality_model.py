"""tools/quality_model: it learns as a plain loop in PyTorch does, its file scores documents in stage=shard, and every run is the same."""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.common import artifact
from pipeline.data.clean import fasttext_model
from pipeline.data.clean.fasttext_model import FastText
from pipeline.data.shard import text_shards
from tests.helpers import load_tool, prose
from tests.training.one_rank import run

TERMS = "options: --verbose --quiet --output=FILE see config.h and 0x7f error ENOENT 404 struct int * NULL"


def write_documents(folder: Path) -> list[str]:
    """Write 150 good documents and as many others, and return the options of a small classifier of them."""
    draw = random.Random(3)
    texts = {"good": [prose(number) for number in range(150)], "other": [" ".join(draw.choices(TERMS.split(), k=60)) for _ in range(150)]}
    for name, mine in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in mine))
    files = (f"--{name}={folder}/{name}.jsonl" for name in texts)
    return [*files, "--text-field=content", "--buckets=1000"]


def test_documents_are_told_apart_and_scored_in_cleaning(tmp_path, capsys):
    tool, options = load_tool("quality_model"), write_documents(tmp_path)
    scorer, shards = tmp_path / "scorer.bin", tmp_path / "shards"
    assert tool.main([*options, f"--out={scorer}"]) == 0
    head, _, _, *rows = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"(\d+) documents held out, (\d+) good: accuracy 1.0000, area under the ROC curve 1.0000", head)
    assert found is not None, head
    held_out, good = map(int, found.groups())
    assert 15 < held_out < 50
    cells = [re.split(r"\s{2,}", row) for row in rows]
    assert cells[0][:4] == ["good", f"{tmp_path}/good.jsonl", "en", str(good)]
    assert cells[0][5:8] == ["100 %"] * 3, "at or above 0.1, 0.3 and 0.5"
    assert {(row[0], *row[7:]) for row in cells[1:]} == {("other", "0 %", "0 %", "0 %")}
    assert sum(int(row[3]) for row in cells) == held_out

    steps = (
        "clean.steps=[normalise,score]",
        "dedup=none",
        "data.validation_fraction=0",
        "clean.score.least=0.5",
        "data.text_field=content",
    )
    inputs = f"data.input=[{tmp_path}/good.jsonl,{tmp_path}/other.jsonl]"
    run("shard", tmp_path, inputs, f"data.shards={shards}", *steps, f"clean.score={{model: {scorer}, label: good}}")
    manifest = artifact.read(shards, key="data.shards", stage="shard")
    documents = [each for name in manifest.files if name.endswith(".tar") for each in text_shards.readable(shards, manifest, name)]
    assert len(documents) == 150
    assert {fields["source"] for _, fields in documents} == {"good.jsonl"}
    assert tool.main([options[1], "--good", f"{shards}/*.tar", *options[2:], f"--out={tmp_path}/again.bin"]) == 0
    assert f"\ngood   {shards}/*.tar" in capsys.readouterr().out, "shards of a run"


def test_the_same_documents_and_seed_give_the_same_file(tmp_path):
    tool, options = load_tool("quality_model"), write_documents(tmp_path)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert tool.main([*options, f"--seed={seed}", f"--out={tmp_path / name}"]) == 0
    first, again, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == again
    assert len(first) == len(other)
    assert first != other


@pytest.mark.parametrize("characters", [(0, 0), (2, 3)])
def test_it_learns_as_pytorch_does(tmp_path, characters):
    """The mean of embeddings, a linear layer and cross-entropy, by plain SGD; and the file has what was learned."""
    texts, labels = [prose(1, 3), TERMS, f"{prose(2, 3)} __label__x", "", TERMS[:30]], [0, 1, 0, 1, 1]
    words = fasttext_model.count_words(texts, 2)
    rows, dim, epochs, rate, settings = len(words) + 50, 4, 3, 0.7, (2, characters)
    start = np.random.default_rng(5)
    first = start.uniform(-1 / dim, 1 / dim, (rows, dim)).astype(np.float32)
    bag, head = nn.EmbeddingBag.from_pretrained(torch.tensor(first), freeze=False, mode="mean"), nn.Linear(dim, 2, bias=False)
    nn.init.zeros_(head.weight)
    with open(tmp_path / "untrained.bin", "wb") as file:
        fasttext_model.write(file, words, {"good": 2, "other": 3}, (first, np.zeros((2, dim))), *settings)
    model = FastText(tmp_path / "untrained.bin")
    for step, number in enumerate(number for _ in range(epochs) for number in start.permutation(len(texts)).tolist()):
        loss = F.cross_entropy(head(bag(torch.tensor(model.rows([texts[number]])[0])[None])), torch.tensor([labels[number]]))
        for parameter, gradient in zip((bag.weight, head.weight), torch.autograd.grad(loss, (bag.weight, head.weight)), strict=True):
            parameter.data -= rate * (1 - step / (epochs * len(texts))) * gradient

    tool, options = load_tool("quality_model"), argparse.Namespace(seed=5, dim=dim, epochs=epochs, rate=rate)
    matrices = tool.descend(options, list(tool.examples_of(model, texts)), labels, rows)
    for ours, theirs in zip(matrices, (bag.weight, head.weight), strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs.detach(), rtol=1e-5, atol=1e-6)
    assert np.abs(matrices[0] - first).max() > 0.01, "differences would not show"
    with open(tmp_path / "trained.bin", "wb") as file:
        fasttext_model.write(file, words, {"good": 2, "other": 3}, matrices, *settings)
    expected = torch.cat([head(bag(torch.tensor(model.rows([text])[0])[None])) for text in texts]).softmax(dim=1)
    np.testing.assert_allclose(FastText(tmp_path / "trained.bin").probabilities(texts), expected.detach(), rtol=1e-5)


def test_the_area_is_that_of_pairs():
    draw = np.random.default_rng(0)
    good, other = draw.integers(3, 9, 40) / 8, draw.integers(0, 7, 70) / 8
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in good for b in other]
    assert load_tool("quality_model").area(good, other) == pytest.approx(sum(pairs) / len(pairs))


def test_what_cannot_be_learned_from_is_refused(tmp_path, capsys):
    tool, options = load_tool("quality_model"), write_documents(tmp_path)
    (tmp_path / "few.jsonl").write_text('{"content": "one"}\n{"content": 2}\n')
    for more, said in (
        (["--good", f"{tmp_path}/none"], r"--good=.*none: no such file"),
        (["--good", f"{tmp_path}/few.jsonl"], r"--good=.*few.jsonl: has 1 documents, too few"),
        ([options[0], "--least=100000"], "--least=100000: is more often than any word occurs"),
        ([options[0], "--dim=0"], "--dim=0: is below 1"),
        ([options[0], f"--out={tmp_path}/few.jsonl/scorer.bin"], r"--out=.*few.jsonl: cannot be written"),
    ):
        assert tool.main([*options[1:], f"--out={tmp_path}/scorer.bin", *more]) == 2
        assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "scorer.bin").exists()
