"""stage=convert with stage.quantize, of an imported model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config.rules import convert as rules
from pipeline.config.stages import Convert
from tests.conversion.test_huggingface_export import TEXT, export, random_model, tokenizer_folder  # noqa: F401 - a fixture
from tests.helpers import pipeline
from tests.models.small_decoders import CONFIGS


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer_folder) -> Path:  # noqa: F811 - the fixture
    """A run directory with an imported model, and documents."""
    folder = tmp_path_factory.mktemp("run")
    config = replace(CONFIGS["llama-grouped"], ffn_hidden=96)
    export(folder / "stock", random_model(config), config, tokenizer_folder)
    pipeline("stage=convert", f"stage.input={folder / 'stock'}", f"run_dir={folder}")
    for name, count in (("calibration", 20), ("held_out", 6)):
        lines = [json.dumps({"text": f"{TEXT} {name} {number}"}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join([*lines, *["{broken"] * 7]) + "\n")
    return folder


def convert(run: Path, *more: str, expect: int = 0) -> str:
    return pipeline("stage=convert", f"run_dir={run}", f"tokenizer.path={run / 'imported'}", *more, expect=expect)


def int4(run: Path) -> tuple[str, ...]:
    return ("stage.quantize=int4", "stage.group_size=32", f"stage.held_out=[{run / 'held_out.jsonl'}]", "stage.dtype=bf16")


@pytest.fixture(scope="module")
def rounded(run) -> str:
    """What is printed of an export in 4 bits."""
    return convert(run, *int4(run))


def test_int4_is_reported_and_loads(run, rounded):
    assert "stage.held_out: skipped held_out.jsonl line 11" in rounded
    assert "line 12" not in rounded
    assert "stage.held_out: skipped 7 records" in rounded
    assert "bits per quantized weight" in rounded
    assert "GPTQ" not in rounded
    assert "nothing to do" in convert(run, *int4(run))
    report = json.loads((run / "hf-int4/quantization.json").read_text())
    assert 4.5 < report["bits"] < 4.55  # a scale of 16 bits for 32 weights, and the shapes
    assert report["bytes_after"] < 0.6 * report["bytes_before"]
    assert report["perplexity_before"] != report["perplexity_after"] == pytest.approx(report["perplexity_before"], rel=0.5)
    stock = AutoModelForCausalLM.from_pretrained(run / "hf-int4")
    assert stock.dtype == torch.bfloat16
    assert "stage.group_size=16" in convert(run, "stage.quantize=int4", "stage.group_size=16", expect=2)


@pytest.mark.usefixtures("rounded")
def test_gptq_reads_calibration_documents(run):
    """On documents like those of the calibration, its perplexity is closer to the original one."""
    gptq = ("stage.rounding=gptq", f"stage.calibration=[{run / 'calibration.jsonl'}]", f"stage.output={run / 'gptq'}")
    assert "GPTQ calibrates with" in convert(run, *int4(run), *gptq)
    reports = [json.loads((run / folder / "quantization.json").read_text()) for folder in ("gptq", "hf-int4")]
    gaps = [abs(math.log(report["perplexity_after"] / report["perplexity_before"])) for report in reports]
    assert gaps[0] < gaps[1]


def test_gguf_is_reported(run):
    convert(run, "stage.format=gguf", "stage.quantize=q8_0", f"stage.held_out=[{run / 'held_out.jsonl'}]")
    report = json.loads((run / "gguf-q8_0/quantization.json").read_text())
    assert 8.5 < report["bits"] < 8.7
    assert report["perplexity_after"] == pytest.approx(report["perplexity_before"], rel=0.02)
    assert (run / "gguf-q8_0/model.gguf").stat().st_size > report["bytes_after"]
    refused = convert(run, "stage.format=gguf", "stage.quantize=q4_k", expect=2)
    assert "stage.quantize=q4_k: cannot be written: the package gguf decodes this type" in refused


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"quantize": "int4", "input": "/models/other"}, "stage.quantize=int4: applies to an export, and stage.input imports"),
        ({"quantize": "int4", "granularity": "tensor"}, "stage.granularity=tensor: applies to int8"),
        ({"quantize": "int8_dynamic", "symmetric": False}, "stage.symmetric=False: is not supported by int8_dynamic"),
        ({"quantize": "int8", "format": "peft"}, "stage.quantize=int8: is not supported by stage.format=peft"),
        ({"quantize": "int8", "format": "megatron"}, "stage.quantize=int8: is not supported by stage.format=megatron"),
        ({"quantize": "int8", "format": "gguf"}, "stage.quantize=int8: is not a type of stage.format=gguf"),
        ({"quantize": "q8_0"}, "stage.quantize=q8_0: requires stage.format=gguf"),
        ({"quantize": "int4", "rounding": "gptq"}, "stage.calibration=[]: is required by stage.rounding=gptq"),
        ({"quantize": "int4", "calibration": ["a"]}, "stage.calibration=['a']: has no effect with stage.rounding=nearest"),
        ({"held_out": ["a"]}, "stage.held_out=['a']: has no effect with stage.quantize=none"),
    ],
)
def test_settings_that_contradict_each_other(settings, said):
    (violation,) = rules.violations(Convert(name="convert", **settings))
    assert str(violation).startswith(said)


def test_refusals(run, tmp_path):
    def refused(*more: str) -> str:
        return convert(run, *more, f"stage.output={tmp_path / 'out'}", expect=2)

    assert "stage.quantize=int3: must be one of none, int8, int8_dynamic, int4, q8_0, q4_0, q4_k" in refused("stage.quantize=int3")
    message = refused("stage.quantize=int4", "stage.group_size=48", f"stage.held_out=[{tmp_path / 'none.jsonl'}]")
    assert "stage.group_size=48: must divide the 64 inputs of blocks.0.attention.query" in message
    assert "stage.held_out=" in message
    assert "no such file" in message
    assert not (tmp_path / "out").exists()
