"""Sequence classification: the stock classes, layouts against a plain loop, a run on the command line, and lines that cannot be used."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import confusion_matrix, f1_score
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.certification.reference import initialize
from pipeline.common.errors import UserError
from pipeline.common.json_lines import BadLine
from pipeline.data.load.objectives.classification import LabelReader, labels_of
from pipeline.layers.loss import IGNORE
from pipeline.models import config_json, registry
from pipeline.models.families.bert import BertConfig
from pipeline.models.families.roberta import PADDING, RobertaConfig
from tests.conversion.test_huggingface_export import export, random_model
from tests.helpers import pipeline
from tests.models.test_encoders import SIZES, drawn, pair
from tests.training import one_rank
from tests.training.expected import train_plain
from tests.world import configured, in_layout, share_of, tiny, train_steps, trainer

LABELS = ["bad", "fair", "good"]
CONFIGS = {"bert": BertConfig(**SIZES).classifier(LABELS), "roberta": RobertaConfig(**SIZES).classifier(LABELS)}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_labels_are_those_of_the_stock_class(name):
    """With padding and, for BERT, two segments; the exported config.json is read back."""
    config = CONFIGS[name]
    ours, theirs = pair(config)
    assert theirs.config.id2label == dict(enumerate(LABELS))
    tokens, valid = drawn(config), torch.arange(40) < torch.tensor([40, 23, 5])[:, None]
    tokens[~valid] = PADDING
    segments = (torch.arange(40) >= 17).long().expand(3, 40) * (config.segments > 1)
    with torch.no_grad():
        expected = theirs(tokens, token_type_ids=segments, attention_mask=valid.long()).logits
        found = ours(tokens, segments=segments, documents=torch.where(valid, 0, -1).int())
    assert found.std() > 0.05, "differences would not show"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    content = json.loads(json.dumps(registry.mapping_of(config).config_json(config)))
    family, mapping = registry.find_mapping(content)
    assert config_json.read(mapping, type(config), content) == config
    assert family is registry.FAMILIES[name]


STEPS, HEAD = 3, ("model.labels=[a,b,c]", "model.next_sentence=false", "model.tie_embeddings=false")
SETTINGS = ("stage=finetune", "model=bert-tiny", "model.layers=4", *HEAD, "training.objective=classification")


def texts(config: Any, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Random texts of different lengths with a label; the last one has none."""
    generator = torch.Generator().manual_seed(step)
    rows, length = config.training.global_batch_size, config.training.sequence_length
    targets = torch.full((rows, length), IGNORE)
    targets[:-1, 0] = torch.randint(3, (rows - 1,), generator=generator)
    valid = torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=generator)
    tokens = torch.randint(config.model.vocab_size, (rows, length), generator=generator)
    return tokens, {"targets": targets, "documents": torch.where(valid, 0, -1).int()}


class Plain(nn.Module):
    """PyTorch's cross-entropy of the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens, documents=documents), targets[:, 0], ignore_index=IGNORE)


@functools.cache
def reference() -> tuple[list[tuple[float, ...]], torch.Tensor]:
    """Loss and gradient norm of every step, and the confusion matrix of the first batch before training."""
    config = configured(*tiny(*SETTINGS))
    model = registry.build(config.model)
    initialize(model, config.model, config.training.seed)
    batches = [texts(config, step) for step in range(STEPS)]
    tokens, batch = batches[0]
    with torch.no_grad():
        predicted = model(tokens, documents=batch["documents"]).argmax(1)[:-1]
    confusion = torch.zeros(3, 3)
    for label, guess in zip(batch["targets"][:-1, 0].tolist(), predicted.tolist(), strict=True):
        confusion[label, guess] += 1
    return train_plain(config, batches, model=Plain(model), own_loss=True).numbers, confusion


def train(layout: str) -> tuple[list[tuple[float, float]], torch.Tensor]:
    config, mine = trainer(*tiny(*SETTINGS, *in_layout(layout)))
    _, counts = mine.evaluate(*share_of(mine, *texts(config, 0)))
    confusion = mine.measured(9).view(3, 3)
    assert int(counts.sum()) == config.training.global_batch_size - 1
    return train_steps(mine, config, texts, STEPS), confusion


@pytest.mark.long
@pytest.mark.parametrize("layout", ["zero_stage=1 tensor=2", "zero_stage=3", "zero_stage=0 pipeline=2"])
def test_two_ranks_equal_a_plain_loop(worlds, layout):
    expected, confusion = reference()
    for found, counted in worlds(2).run(train, layout):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        assert torch.equal(counted, confusion)


WORDS = ["film", "boring", "superb", "plot", "is", "was", "the", "a", "end", "song"]


def write_tokenizer(folder) -> None:
    """A tokenizer of words, with the special tokens of BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(special + WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    pairs = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=pairs
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_head_is_trained_beside_adapters():
    config = configured(*tiny(*SETTINGS, "lora.rank=4"))
    names = ("head.sentence.dense.weight", "blocks.0.mlp.up.lora.a", "blocks.0.mlp.up.weight", "embed.tokens.weight")
    assert [config.is_frozen(name) for name in names] == [False, False, True, True]


def test_a_run_learns_and_its_export_classifies_texts_alike(tmp_path):
    """From a masked language model with a pooler; the labels are those of the files. Lines that cannot be used are named."""
    config = BertConfig(layers=1, hidden=32, heads=2, ffn_hidden=64, vocab_size=24, max_positions=16)
    write_tokenizer(tmp_path / "tokenizer")
    export(tmp_path / "stock", random_model(config), config, tmp_path / "tokenizer")
    one_rank.run("convert", tmp_path / "base", f"stage.input={tmp_path / 'stock'}")
    chance = torch.Generator().manual_seed(0)

    def line() -> dict[str, Any]:
        words = [WORDS[number] for number in torch.randint(len(WORDS), (6,), generator=chance)]
        score = words.count("superb") - words.count("boring")
        return {"text": " ".join(words[:4]), "text_pair": " ".join(words[4:]), "label": (score > 0) - (score < 0)}

    lines = {"train": [line() for _ in range(160)], "validation": [line() for _ in range(40)]}
    for name, found in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    with open(tmp_path / "validation.jsonl", "a", encoding="utf-8") as handle:
        handle.write('{"text": "film", "label": "7"}\n{"label": 1}\n')
    common = (f"tokenizer.path={tmp_path / 'tokenizer'}", f"run_dir={tmp_path / 'run'}")
    files = (f"data.instructions.train=[{tmp_path}/train.jsonl]", f"data.instructions.validation=[{tmp_path}/validation.jsonl]")
    settings = (
        "stage=finetune", "training.objective=classification", f"checkpoint.initialize_from={tmp_path / 'base'}", *common, *files,
        "precision=fp32", "training.sequence_length=16", "training.global_batch_size=16", "training.steps=60", "optimizer.lr=0.01",
        "optimizer.warmup_steps=3", "tracking=disabled", "parallel.zero_stage=0", "data.quarantine_limit=0.1",
    )  # fmt: skip
    printed = pipeline(*settings)
    assert "line 41: \"label\" is '7', which is none of -1, 0, 1" in printed
    assert 'line 42: has no "text"' in printed
    found = [json.loads(each) for each in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert found[-1]["accuracy"] > 0.75
    assert f"accuracy {found[-1]['accuracy']:.4f}" in printed
    assert "nothing to do" in pipeline(*settings)

    one_rank.run("convert", tmp_path / "run", common[0])
    stock, text = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/hf"),
        AutoTokenizer.from_pretrained(tmp_path / "run/hf"),
    )
    assert stock.config.id2label == {0: "-1", 1: "0", 2: "1"}
    total, right, predicted = 0.0, 0, []
    for each in lines["validation"]:
        inputs = text(each["text"], each["text_pair"], return_tensors="pt", return_token_type_ids=True)
        with torch.no_grad():
            logits = stock(**inputs).logits
        total += float(F.cross_entropy(logits, torch.tensor([each["label"] + 1]))) / 40
        predicted.append(int(logits.argmax()))
        right += predicted[-1] == each["label"] + 1
    assert total == pytest.approx(found[-1]["validation_loss"], abs=1e-5)
    assert right / 40 == pytest.approx(found[-1]["accuracy"])

    printed = pipeline("stage=evaluate", *common, files[1], "training.sequence_length=16", "precision=fp32", "data.quarantine_limit=0.1")
    scores, labels = json.loads((tmp_path / "run/evaluation.json").read_text()), [each["label"] + 1 for each in lines["validation"]]
    assert scores["validation_loss"] == pytest.approx(total, abs=1e-5)
    assert scores["accuracy"] == pytest.approx(right / 40)
    assert scores["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert scores["confusion"] == {"labels": ["-1", "0", "1"], "counts": confusion_matrix(labels, predicted).tolist()}
    assert "texts by label (row) and predicted label (column)" in printed
    with pytest.raises(UserError, match=r"stage.stride=8: requires a causal"):
        one_rank.run("evaluate", tmp_path / "run", common[0], files[1], "training.sequence_length=16", "stage.stride=8")


def test_lines(tmp_path):
    """Labels are sorted, numbers by value; a pair is cut in its longer text, and lines that cannot be used have a reason."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"label": 10}\n{"label": "9"}\nx\n{"label": true}\n')
    assert labels_of([str(path)], "key") == ["9", "10"]
    (tmp_path / "dashes.jsonl").write_text('{"label": "--1"}\n{"label": 10}\n{"label": 9}\n')
    assert labels_of([str(tmp_path / "dashes.jsonl")], "key") == ["--1", "10", "9"]
    write_tokenizer(tmp_path / "tokenizer")
    special = (2, (3, 3), 3)
    reader = LabelReader(tmp_path / "tokenizer", 5, 9, ["no", "yes"], special, too_long="truncate")
    lines = [{"text": "film plot end song was", "text_pair": "is a", "label": "yes"}, {"text": "film [SEP]", "label": "no"}]
    cut, plain = reader.read([json.dumps(line).encode() for line in lines])
    film, plot, end, is_, a = (6 + WORDS.index(word) for word in ("film", "plot", "end", "is", "a"))
    assert cut.tokens.tolist() == [2, film, plot, end, 3, 3, is_, a, 3, 1]
    assert plain.tokens.tolist()[:2] == [2, film]
    assert plain.tokens.tolist().count(3) == 1, "text that spells a special token is text"
    bad = {
        b"{": "is not JSON",
        b"[]": "must be an object",
        b'{"text": "a"}': 'has no "label"',
        b'{"text": "a", "label": null}': "must be a text or an integer",
        b'{"text": "", "label": "no"}': '"text" must be a text that is not empty',
        b'{"text": "a", "text_pair": 1, "label": "no"}': '"text_pair" must be a text',
        b'{"text": "a a a a a a a a", "label": "no"}': "has 8 tokens of text; training.sequence_length=9 has room for 7",
    }
    strict = LabelReader(tmp_path / "tokenizer", 5, 9, ["no", "yes"], special, too_long="refuse")
    for found, reason in zip(strict.read(list(bad)), bad.values(), strict=True):
        assert isinstance(found, BadLine)
        assert reason in str(found)
