"""tools/checkpoint merge: the mean of checkpoints is a run directory that evaluates, exports and trains on."""

import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint import native
from pipeline.checkpoint.compatibility import fingerprint_of
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.atomic_files import digest
from pipeline.common.errors import UserError
from pipeline.conversion import merge
from tests.helpers import load_tool, pipeline, with_manifest
from tests.training.one_rank import lines, newest, run
from tests.world import configured


@pytest.fixture(scope="module")
def trained(tokens, tokenizer, tmp_path_factory) -> Path:
    """Four steps, with an average of the weights."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run("pretrain", folder, f"data.tokens={tokens}", f"tokenizer.path={tokenizer}", "training.steps=4", "training.ema=0.75")
    return folder


def tool(*arguments: object) -> int:
    """Run tools/checkpoint in this process, and return its exit code."""
    return load_tool("checkpoint").main(["merge", *map(str, arguments)])


def at(run_dir: Path, step: int) -> Checkpoint:
    return Checkpoint(native.folder_of(run_dir, step))


CASES = [
    (("{run}/step-1", "{run}/step-2", "{run}"), {1: 1, 2: 1, 4: 1}),
    (("{run}/step-4", "{run}/step-2", "--weights", "1,3"), {4: 0.25, 2: 0.75}),
    (("{run}", "--last", "3", "--decay", "0.5"), {2: 0.25, 3: 0.5, 4: 1}),
]


@pytest.mark.parametrize("words, shares", CASES, ids=[" ".join(words) for words, _ in CASES])
def test_weights_and_moments_are_the_mean(trained, tmp_path, monkeypatch, words, shares):
    monkeypatch.setattr(merge, "CHUNK", 3000)  # less than the embedding has
    assert tool(*(word.format(run=trained) for word in words), "--output", tmp_path / "merged") == 0
    step, total = max(shares), sum(shares.values())
    merged, members = at(tmp_path / "merged", step), {each: at(trained, each) for each in shares}
    last = members[step]
    assert merged.names() == last.names()
    for name in merged.names():
        for kind in ("weight", "exp_avg", "exp_avg_sq", "ema"):
            expected = sum(members[each].tensor(name, kind).double() * share / total for each, share in shares.items())
            torch.testing.assert_close(merged.tensor(name, kind), expected.float(), rtol=2**-23, atol=0)  # one unit in the last place
    assert (merged.train_state, merged.data) == (last.train_state, last.data)
    parent = merged.index.parent
    assert (parent["how"], parent["step"], parent["path"]) == ("merge", step, str(native.folder_of(trained, step)))
    assert {member["step"]: member["weight"] for member in parent["members"]} == pytest.approx({k: v / total for k, v in shares.items()})


def test_the_mean_of_one_checkpoint_is_that_checkpoint(trained, tmp_path):
    merge.merge([merge.MergeMember(at(trained, 4), 1 / 3)] * 3, tmp_path / "merged")
    for name in at(trained, 4).names():
        assert torch.equal(at(tmp_path / "merged", 4).tensor(name), at(trained, 4).tensor(name))


def test_a_merged_run_evaluates_exports_and_trains_on(tokens, tokenizer, trained, tmp_path, caplog):
    merged, data = tmp_path / "merged", f"data.tokens={tokens}"
    assert tool(trained, "--last", 2, "--output", merged) == 0
    run("evaluate", merged, data)
    evaluated = json.loads((merged / "evaluation.json").read_text())
    assert evaluated["step"] == 4
    run("convert", merged, f"tokenizer.path={tokenizer}")
    assert (merged / "hf" / "model.safetensors").is_file()
    with caplog.at_level(logging.INFO, "pipeline"):
        run("pretrain", merged, data, "training.steps=6", "training.ema=0.75")
    assert "continuing from" in caplog.text
    assert "step 4, 16 samples" in caplog.text
    assert [line["samples"] for line in lines(merged).values()] == [20, 24]
    assert newest(merged).parent["how"] == "merge"
    run("pretrain", tmp_path / "branch", data, f"checkpoint.fork={merged}/step-4", "training.steps=5")
    assert lines(tmp_path / "branch")[5]["loss"] == lines(merged)[5]["loss"]


def test_the_same_command_finds_its_work_done(trained, tmp_path, caplog, capsys):
    words = (trained, "--last", 2, "--output", tmp_path / "merged")
    assert tool(*words) == 0
    before = (native.folder_of(tmp_path / "merged", 4) / native.INDEX).stat().st_mtime_ns
    with caplog.at_level(logging.INFO, "pipeline"):
        assert tool(*words) == 0
    assert "nothing to do" in caplog.text
    assert (native.folder_of(tmp_path / "merged", 4) / native.INDEX).stat().st_mtime_ns == before
    for output in (tmp_path / "merged", trained):
        assert tool(trained, "--last", 3, "--output", output) == 2
        assert f"--output={output}: contains the checkpoints of another run, the newest of step 4" in capsys.readouterr().err


REFUSED = [
    (("{run}",), "is one checkpoint, and a mean is of two or more"),
    (("{run}", "{run}/step-9"), "{run}/step-9: is not a complete checkpoint; {run} has those of steps 1, 2, 3, 4"),
    (("{run}", "{run}/step-2", "--weights", "1,2,3"), "--weights=1,2,3: must have one weight for each of the 2 checkpoints, and has 3"),
    (("{run}", "{run}/step-2", "--weights", "1"), "--weights=1: must have one weight for each of the 2 checkpoints, and has 1"),
    (("{run}", "{run}/step-2", "{run}/step-4"), "{run}/checkpoints/step-00000004: is named twice"),
    (("{run}", "{run}", "--weights", "1,-1"), "--weights=1,-1: must be numbers above 0"),
    (("{run}", "{run}", "--weights", "1,nan"), "must be numbers above 0"),
    (("{run}", "--last", "5"), "--last=5: is more than {run} has (steps 1, 2, 3, 4)"),
    (("{run}", "--last", "1"), "--last=1: must be 2 or more"),
    (("{run}", "--last", "2", "--decay", "1.5"), "--decay=1.5: must be above 0 and at most 1"),
]


@pytest.mark.parametrize("words, said", REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_refused(trained, tmp_path, capsys, words, said):
    assert tool(*(word.format(run=trained) for word in words), "--output", tmp_path / "merged") == 2
    assert said.format(run=trained) in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


@pytest.fixture(scope="module")
def tokenizers(tokenizer, tmp_path_factory) -> dict[str, Path]:
    """Tokenizers that differ from that of the tokens: in two ids, or only in a special token of its own."""
    folder = tmp_path_factory.mktemp("tokenizers")
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    swapped = {**vocabulary, "a": vocabulary["b"], "b": vocabulary["a"]}
    more = [*content["added_tokens"], {**content["added_tokens"][0], "id": 300, "content": "<|turn|>"}]
    changes = {"other": {"model": {**content["model"], "vocab": swapped}}, "extended": {"added_tokens": more}}
    for name, change in changes.items():
        shutil.copytree(tokenizer, folder / name)
        (folder / name / "tokenizer.json").write_text(json.dumps(content | change))
    return {name: folder / name for name in changes}


def test_every_stage_refuses_another_tokenizer_than_that_of_the_tokens(tokens, trained, tokenizers, tmp_path):
    """A tokenizer with more special tokens gives text the same ids, so that weights may be used with it."""
    other, data, start = f"tokenizer.path={tokenizers['other']}", f"data.tokens={tokens}", f"checkpoint.initialize_from={trained}"
    (tmp_path / "lines.jsonl").write_text('{"prompt": "ab", "completion": "ba"}\n' * 4)
    prompts, where = f"stage.prompts={tmp_path}/lines.jsonl", f"stage.output={tmp_path}"
    cases = [
        ("pretrain", tmp_path / "begun", f"{tokens} was made with", data, "training.steps=1"),
        ("evaluate", trained, f"{tokens} was made with", data),
        ("convert", trained, "step-00000004 was made with", f"{where}/hf"),
        ("generate", trained, "step-00000004 was made with", prompts, f"{where}/generated"),
    ]
    for stage, run_dir, said, *settings in cases:
        with pytest.raises(UserError, match=re.escape(said)) as raised:
            run(stage, run_dir, other, *settings)
        assert [(found.key, str(found.value)) for found in raised.value.violations] == [("tokenizer.path", str(tokenizers["other"]))], stage
    tuned = (start, f"run_dir={tmp_path}/tuned", f"data.instructions.train=[{tmp_path}/lines.jsonl]", "training.sequence_length=32")
    said = pipeline("stage=finetune", other, *tuned, "training.steps=1", "precision=fp32", "tracking=disabled", expect=2)
    assert "step-00000004 was made with" in said
    run("generate", trained, f"tokenizer.path={tokenizers['extended']}", prompts, f"{where}/generated", "stage.max_tokens=1")


def test_the_tokenizer_of_an_imported_model_is_its_own(tokenizers, tmp_path):
    """Not that of the default tokenizer.path of the import: merges of two imported models compare their tokenizers."""
    shutil.copytree(tokenizers["other"], tmp_path / "run/imported")
    config = {"stage": {"name": "convert"}, "tokenizer": {"path": str(tokenizers["extended"])}}
    found = fingerprint_of(config, tmp_path / "run/checkpoints/step-00000000")
    assert found == digest(tokenizers["other"] / "tokenizer.json")


@pytest.mark.parametrize("words", [("--decay", "0.5"), ("--weights", "1;2"), ("--last", "2", "more")])
def test_options_that_say_nothing_are_refused(trained, tmp_path, words):
    with pytest.raises(SystemExit) as raised:
        tool(trained, *words, "--output", tmp_path / "merged")
    assert raised.value.code == 2


@pytest.fixture(scope="module")
def others(tokens, trained, tmp_path_factory) -> dict[str, Path]:
    """Runs that are not to be merged with the first one, or with each other."""
    folder, start = tmp_path_factory.mktemp("others"), (f"data.tokens={tokens}", "lora.rank=2", "training.steps=1")
    run("pretrain", folder / "rank 2", *start, f"checkpoint.initialize_from={trained}")
    run("pretrain", folder / "base", *start, f"checkpoint.initialize_from={trained}/step-1")
    with_manifest(tokens, folder / "tokens", lambda manifest: manifest["totals"].update(tokenizer="another"))
    llama = configured("stage=pretrain", "model=llama-tiny").model

    def altered(name: str, source: Path, key: str, values: dict[str, object]) -> None:
        """The first checkpoint of a run, with other settings in its index."""
        step = native.folder_of(folder / name, 1)
        shutil.copytree(native.folder_of(source, 1), step)
        index = native.read_index(step)
        group = values if "family" in values else {**index.config[key], **values}
        native.write_index(step, dataclasses.replace(index, config={**index.config, key: group}))

    altered("layers", trained, "model", {"layers": 2})
    altered("family", trained, "model", {**dataclasses.asdict(llama), "family": llama.family})
    altered("tokenizer", trained, "data", {"tokens": f"{folder}/tokens"})
    altered("rank 3", folder / "rank 2", "lora", {"rank": 3})
    return {path.name: path for path in folder.iterdir() if path.name != "tokens"} | {"trained": trained}


@pytest.mark.parametrize(
    "first, second, said",
    [
        ("trained", "layers", "has model.layers=2; "),
        ("trained", "family", "has model.family=llama; "),
        ("trained", "tokenizer", "has checksum of the tokenizer=another; "),
        ("trained", "rank 2", "has lora.rank=2; "),
        ("rank 2", "rank 3", "has lora.rank=3; "),
        ("rank 2", "base", "has adapters of another base than "),
    ],
)
def test_different_models_tokenizers_and_adapters_are_refused(others, tmp_path, capsys, first, second, said):
    assert tool(others[first], others[second], "--output", tmp_path / "merged") == 2
    assert f"PATH={others[second]}/checkpoints/step-00000001: {said}" in capsys.readouterr().err
    assert not native.complete(tmp_path / "merged")


def test_adapters_of_one_base_are_averaged(others, tokens, tmp_path):
    run("pretrain", tmp_path / "other", f"data.tokens={tokens}", f"checkpoint.fork={others['rank 2']}", "training.steps=2", "lora.rank=2")
    assert tool(others["rank 2"], tmp_path / "other", "--mean", "--output", tmp_path / "merged") == 0
    a, b, merged = at(others["rank 2"], 1), at(tmp_path / "other", 2), at(tmp_path / "merged", 2)
    for name in merged.names():
        torch.testing.assert_close(merged.tensor(name), (a.tensor(name) + b.tensor(name)) / 2, rtol=1e-6, atol=1e-9)
    assert any(not torch.equal(merged.tensor(name), a.tensor(name)) for name in merged.names())


def test_moments_that_a_member_lacks_are_left_out_and_announced(trained, tokens, tmp_path, caplog):
    run("pretrain", tmp_path / "run", f"data.tokens={tokens}", f"checkpoint.fork={trained}", "training.steps=5")
    with caplog.at_level(logging.WARNING, "pipeline"):
        assert tool(trained, tmp_path / "run", "--output", tmp_path / "merged") == 0
    assert f"ema: {tmp_path}/run/checkpoints/step-00000005 has none, so the merged checkpoint has none either" in caplog.text
    assert set(newest(tmp_path / "merged").kinds) == {"weight", "exp_avg", "exp_avg_sq"}
