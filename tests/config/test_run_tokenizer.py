"""The tokenizer settings that a command leaves to the run directory."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import run_tokenizer
from tests.world import configured

DEFAULTS = ("work/tokenizer", "<|endoftext|>", None)


def make(folder: Path, special: list[str], **files: Any) -> Path:
    """Write a tokenizer with these special tokens, and JSON files beside it."""
    folder.mkdir(parents=True)
    added = [{"id": number, "content": text, "special": True} for number, text in enumerate(special)]
    for name, content in {"tokenizer": {"added_tokens": added}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def settings(*command: str) -> tuple[str, str, str | None]:
    config = configured(*command)
    return config.tokenizer.path, config.tokenizer.end_of_document, config.data.decoder_start


@pytest.fixture
def runs(tmp_path) -> Path:
    """An imported model; a run that was trained with an own tokenizer and end token; and an empty run directory."""
    model = {"is_encoder_decoder": True, "decoder_start_token_id": 2, "eos_token_id": [1, 0]}
    make(tmp_path / "base" / "imported", ["<e>", "</s>", "<start>"], config=model)
    make(tmp_path / "own", ["<x>", "<y>"], tokenizer_config={"eos_token": "<x>"})
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.yaml").write_text(f"tokenizer: {{path: {tmp_path / 'own'}, end_of_document: <y>}}")
    return tmp_path


def test_the_run_directory_decides_what_the_command_does_not(runs):
    base, trained, own = runs / "base", runs / "trained", str(runs / "own")
    imported = (str(base / "imported"), "</s>", "<start>")
    assert settings(f"run_dir={base}", "stage=tokenize") == imported
    assert settings(f"run_dir={trained}", "stage=generate") == (own, "<y>", None)
    assert settings(f"run_dir={runs}/new", "stage=finetune", f"checkpoint.initialize_from={base}") == imported
    checkpoint = base / "checkpoints" / "step-00000000"
    assert settings(f"run_dir={runs}/new", "stage=pretrain", f"checkpoint.initialize_from={checkpoint}") == imported
    assert settings(f"run_dir={trained}", "stage=finetune", f"checkpoint.initialize_from={base}") == (own, "<y>", None)
    assert settings(f"run_dir={trained}", "stage=convert", f"stage.checkpoint={checkpoint}") == imported
    (runs / "own" / "tokenizer.json").unlink()
    assert settings(f"run_dir={trained}", "stage=generate") == DEFAULTS
    assert settings(f"run_dir={runs}/new", "stage=evaluate") == DEFAULTS


def test_a_rank_opens_few_files(runs, monkeypatch):
    """At the start of a job, each of thousands of ranks opens these."""
    opened, read_text = [], Path.read_text

    def noted(path: Path, *arguments: Any, **options: Any) -> str:
        opened.append(path.name)
        return read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", noted)
    assert run_tokenizer.end_of_document(runs / "own") == "<x>"
    assert run_tokenizer.decoder_start(runs / "own") is None
    assert opened == ["tokenizer_config.json", "tokenizer.json", "config.json"]


def test_the_command_decides_what_it_says(runs):
    base, trained, own = f"run_dir={runs / 'base'}", f"run_dir={runs / 'trained'}", str(runs / "own")
    assert settings(base, "stage=generate", f"tokenizer.path={own}") == (own, "<x>", None)
    assert settings(trained, "stage=generate", f"tokenizer.path={own}") == (own, "<y>", None)
    assert settings(base, "stage=generate", 'tokenizer.end_of_document="<e>"', 'data.decoder_start="<e>"')[1:] == ("<e>", "<e>")
    assert settings(base, "stage=generate", "tokenizer=bert")[1] == "[SEP]"
    for stage in ("train_tokenizer", "shard"):
        assert settings(base, f"stage={stage}") == DEFAULTS
        assert settings(base, f"stage={stage}", f"tokenizer.path={own}")[:2] == (own, "<|endoftext|>")


@pytest.mark.parametrize(
    "files, end",
    [
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}, "config": {"eos_token_id": 0}}, "</s>"),
        ({"special_tokens_map": {"eos_token": "</s>"}}, "</s>"),
        ({"tokenizer_config": {"eos_token": "no special token", "sep_token": "<e>"}, "generation_config": {"eos_token_id": 1}}, "</s>"),
        ({"tokenizer_config": {"cls_token": "[CLS]", "sep_token": "<e>"}}, "<e>"),
        ({"config": {"eos_token_id": [9, None]}, "tokenizer_config": []}, None),
        ({}, None),
    ],
)
def test_the_end_of_document_is_what_the_files_of_a_tokenizer_say(files, end, tmp_path):
    folder = make(tmp_path / "tokenizer", ["<e>", "</s>"], **files)
    assert run_tokenizer.end_of_document(folder) == end
    expected = [f"tokenizer.path={folder}", *([f"'tokenizer.end_of_document=\"{end}\"'"] if end else [])]
    assert run_tokenizer.overrides(folder) == expected
    assert run_tokenizer.overrides(tmp_path) == []
