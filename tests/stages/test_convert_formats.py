"""stage=convert to each format on the command line: what it writes, in one process and on several ranks, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conversion.test_huggingface_export import export, random_model, tokenizer_folder  # noqa: F401 - a fixture
from tests.helpers import pipeline, same_files
from tests.models.small_decoders import CONFIGS


def imported(folder: Path, name: str, tokenizer: Path) -> Path:
    """A run directory with an imported model."""
    config = replace(CONFIGS[name], max_positions=40)
    export(folder / "stock", random_model(config), config, tokenizer)
    pipeline("stage=convert", f"stage.input={folder / 'stock'}", f"run_dir={folder / 'run'}")
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer_folder) -> Path:  # noqa: F811 - the fixture
    return imported(tmp_path_factory.mktemp("llama"), "llama-grouped", tokenizer_folder)


def convert(run: Path, *more: object, **options: object) -> str:
    return pipeline("stage=convert", f"run_dir={run}", f"tokenizer.path={run / 'imported'}", *more, **options)


def test_every_format_is_written(run):
    said = {form: convert(run, f"stage.format={form}", "stage.dtype=fp16") for form in ("huggingface", "gguf", "consolidated", "megatron")}
    for form in ("huggingface", "gguf"):
        assert "convert: the digests of all tensors agree; the logits of LlamaForCausalLM differ by at most" in said[form]
    found = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert found >= {
        *("hf/model.safetensors", "hf/config.json", "gguf/model.gguf"),
        *("consolidated/consolidated.safetensors", "consolidated/params.json", "consolidated/tokenizer/tokenizer.json"),
        *("megatron/release/.metadata", "megatron/release/common.pt", "megatron/latest_checkpointed_iteration.txt"),
    }
    manifest = json.loads((run / "megatron/manifest.json").read_text())
    assert manifest["totals"]["parameters"] == 115648
    assert "release/__0_0.distcp" in manifest["files"]
    assert "nothing to do" in convert(run, "stage.format=megatron", "stage.dtype=fp16")
    assert "stage.dtype=bf16" in convert(run, "stage.format=megatron", "stage.dtype=bf16", expect=2)


@pytest.mark.long
@pytest.mark.world
@pytest.mark.parametrize("form", ["huggingface", "megatron"])
def test_ranks_write_the_same_files_as_one_process(form, run, tmp_path):
    settings = (f"stage.format={form}", "stage.shard_gigabytes=0.00006", f"stage.output={tmp_path / 'out'}")
    convert(run, *settings)
    (tmp_path / "out").rename(tmp_path / "alone")
    said = convert(run, *settings, ranks=3)
    assert said.count("convert: wrote") == 1
    assert same_files(tmp_path / "out", tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out"]


def test_models_that_a_format_does_not_hold_are_refused(tmp_path, tokenizer_folder):  # noqa: F811 - the fixture
    run = imported(tmp_path, "opt", tokenizer_folder)
    assert "stage.format=megatron: is supported for model.family=llama, mistral, mixtral; this is opt" in convert(
        run, "stage.format=megatron", expect=2
    )
    assert "stage.format=gguf: is supported for model.family=llama, mistral" in convert(run, "stage.format=gguf", expect=2)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "imported"]
    convert(run, "stage.format=consolidated")
