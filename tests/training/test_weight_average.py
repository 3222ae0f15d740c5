"""training.ema: the average in checkpoints, and in the stages that read them. Layouts and kills: test_layouts.py, test_engine.py."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint import native, save
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import UserError
from pipeline.evaluation import record
from pipeline.parallel.pieces import Piece
from tests.training.one_rank import newest, run


@pytest.fixture(scope="module")
def averaged(tokens, tmp_path_factory) -> Path:
    """Two steps without an average, and two with one."""
    folder = tmp_path_factory.mktemp("averaged") / "run"
    run("pretrain", folder, f"data.tokens={tokens}", "training.steps=2")
    run("pretrain", folder, f"data.tokens={tokens}", "training.steps=4", "training.ema=0.75")
    return folder


def at(run_dir: Path, step: int) -> Checkpoint:
    return Checkpoint(native.folder_of(run_dir, step))


def test_an_average_begins_at_the_weights_of_the_checkpoint(averaged):
    for name in at(averaged, 4).names():
        average = at(averaged, 2).tensor(name)
        for step in (3, 4):
            average = 0.75 * average + 0.25 * at(averaged, step).tensor(name)
            torch.testing.assert_close(at(averaged, step).tensor(name, "ema"), average, rtol=1e-6, atol=1e-8)
    assert not at(averaged, 2).has("embed.tokens.weight", "ema")
    assert "ema" in newest(averaged).kinds


def test_the_beginning_and_the_end_of_an_average_are_announced(tokens, averaged, tmp_path, caplog):
    fork = (f"data.tokens={tokens}", f"checkpoint.fork={averaged}")
    with caplog.at_level(logging.INFO, "pipeline"):
        run("pretrain", tmp_path / "a", *fork[:1], f"checkpoint.fork={averaged}/step-2", "training.steps=3", "training.ema=0.75")
        assert "step-00000002 has no average of weights; it begins at the weights" in caplog.text
        run("pretrain", tmp_path / "b", *fork, "training.steps=5")
        assert "training.ema=None, was 0.75" in caplog.text
    assert "ema" not in newest(tmp_path / "b").kinds
    with caplog.at_level(logging.INFO, "pipeline"):
        caplog.clear()
        run("pretrain", tmp_path / "c", *fork, "training.steps=5", "training.ema=0.75")
        assert "has no average" not in caplog.text
    before, weight, average = (at(folder, step).tensor("norm.weight", kind) for folder, step, kind in
                               ((averaged, 4, "ema"), (tmp_path / "c", 5, "weight"), (tmp_path / "c", 5, "ema")))  # fmt: skip
    torch.testing.assert_close(average, 0.75 * before + 0.25 * weight, rtol=1e-6, atol=1e-8)


def test_weights_of_another_run_begin_the_average(tokens, averaged, tmp_path):
    """checkpoint.initialize_from takes the weights, not their average."""
    run(
        "pretrain",
        tmp_path / "run",
        f"data.tokens={tokens}",
        f"checkpoint.initialize_from={averaged}",
        "training.steps=1",
        "training.ema=0.75",
    )
    for name in at(averaged, 4).names():
        expected = 0.75 * at(averaged, 4).tensor(name) + 0.25 * at(tmp_path / "run", 1).tensor(name)
        torch.testing.assert_close(at(tmp_path / "run", 1).tensor(name, "ema"), expected, rtol=1e-6, atol=1e-8)


@pytest.fixture(scope="module")
def as_weights(averaged, tmp_path_factory) -> Path:
    """A run directory whose weights are the averages."""
    folder, checkpoint = tmp_path_factory.mktemp("as_weights") / "run", at(averaged, 4)
    index = native.Index(checkpoint.train_state, checkpoint.config, checkpoint.data)
    weights = ((name, checkpoint.tensor(name, "ema")) for name in checkpoint.names())
    save.save_full(folder, index, [Fragment(Piece(name, tuple(w.shape)), 0, {"weight": w.view(-1)}) for name, w in weights], 10**9)
    return folder


def test_evaluate_reads_the_average_when_asked(tokens, averaged, as_weights):
    found = {}
    for folder, weights in ((averaged, "trained"), (averaged, "ema"), (as_weights, "trained")):
        run("evaluate", folder, f"data.tokens={tokens}", f"stage.weights={weights}")
        found[folder, weights] = json.loads((folder / "evaluation.json").read_text())
    loss = {key: value["validation_loss"] for key, value in found.items()}
    assert loss[averaged, "ema"] == loss[as_weights, "trained"] != loss[averaged, "trained"]
    assert found[averaged, "ema"]["weights"] == "ema"
    scores = record.read(averaged)[4]
    assert (scores["validation_loss"], scores["ema validation_loss"]) == (loss[averaged, "trained"], loss[averaged, "ema"])


def test_convert_exports_the_average_when_asked(averaged, as_weights, tokenizer):
    outputs = []
    for folder, weights in ((averaged, "ema"), (as_weights, "trained"), (averaged, "trained")):
        output = folder / f"hf-{weights}"
        for _ in range(2):  # the second time there is nothing to do
            run("convert", folder, f"tokenizer.path={tokenizer}", f"stage.weights={weights}", f"stage.output={output}")
        outputs.append(load_file(output / "model.safetensors"))
    same, different = ([torch.equal(value, other[name]) for name, value in outputs[0].items()] for other in outputs[1:])
    assert all(same)
    assert not any(different)
    with pytest.raises(UserError, match=r"stage.weights=ema: "):
        run("convert", averaged, f"tokenizer.path={tokenizer}", "stage.weights=ema", f"stage.output={averaged}/hf-trained")


def test_generate_reads_the_average_when_asked(averaged, as_weights, tokenizer, tmp_path):
    prompts, texts = tmp_path / "prompts.jsonl", []
    prompts.write_text('{"prompt": "der"}\n')
    for folder, weights in ((averaged, "ema"), (as_weights, "trained"), (averaged, "trained")):
        settings = (f"stage.weights={weights}", "stage.logprobs=true", "stage.max_tokens=4", f"stage.output={tmp_path}/{len(texts)}")
        run("generate", folder, f"tokenizer.path={tokenizer}", f"stage.prompts={prompts}", *settings)
        texts.append(json.loads((tmp_path / str(len(texts)) / "completions.jsonl").read_text())["generated"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("stage", ["evaluate", "convert"])
def test_a_run_without_an_average_is_refused(stage, tokens, tokenizer, averaged):
    settings = (f"data.tokens={tokens}", f"tokenizer.path={tokenizer}", f"stage.checkpoint={averaged}/checkpoints/step-00000002")
    with pytest.raises(UserError, match=r"stage.weights=ema: requires averaged weights, and .*step-00000002 has none"):
        run(stage, averaged, *settings, "stage.weights=ema")
