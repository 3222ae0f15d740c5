"""Quantized exports: stock transformers computes the logits of the dequantized weights."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.data import DataConfig
from pipeline.conversion import huggingface_export
from pipeline.layers.uniform_quantization import Scheme
from pipeline.models.families.t5 import T5Config
from pipeline.quantization import compressed_tensors
from pipeline.quantization.calibration_text import read_sequences
from pipeline.quantization.export import scores
from pipeline.quantization.quantized_weights import QuantizedWeights, check_model
from tests.conversion.test_huggingface_export import InMemory, load, random_model
from tests.helpers import one_in
from tests.models.small_decoders import CONFIGS
from tests.quantization.built import build, layers_of

CHANNEL, TENSOR, GROUP = Scheme(8), Scheme(8, per_tensor=True), Scheme(4, group=16)
AFFINE = {"symmetric": False}
#: family and scheme; BLOOM has three interleaved layers in a tensor, OPT biases.
EXPORTS = [
    ("llama-grouped", CHANNEL, False),
    ("llama-tied", replace(CHANNEL, **AFFINE), False),
    ("bloom", replace(TENSOR, **AFFINE), False),
    ("opt", TENSOR, False),
    ("qwen3", CHANNEL, True),
    ("bloom", replace(GROUP, **AFFINE), False),
    ("gemma3", GROUP, False),
    ("phi3", CHANNEL, False),  # queries, keys and values are one tensor
    ("granite", GROUP, False),
    ("olmo3", CHANNEL, False),
    ("gpt-neox", GROUP, False),
    ("gemma2", GROUP, False),  # with soft caps
    ("nemotron", CHANNEL, False),
]


def export(folder: Path, weights: Any, config: Any, scheme: Scheme, *, dynamic: bool, shard_bytes: int = 10**9) -> QuantizedWeights:
    quantized = QuantizedWeights(weights, config, scheme, torch.float32)
    packing = compressed_tensors.QuantizedTensors(quantized, config, dynamic=dynamic, dtype=torch.float32)
    huggingface_export.write_weights(folder, weights, config, dtype=torch.float32, shard_bytes=shard_bytes, packing=packing)
    entry = compressed_tensors.quantization_config(config, scheme, dynamic=dynamic)
    huggingface_export.write_configs(folder, config, dtype=torch.float32, end_of_document_id=0, quantization=entry)
    return quantized


@pytest.mark.parametrize("name, scheme, dynamic", one_in(2, EXPORTS))
def test_logits_of_stock_transformers_are_those_of_the_dequantized_weights(name, scheme, dynamic, tmp_path):
    config = CONFIGS[name]
    weights = InMemory(random_model(config))
    quantized = export(tmp_path, weights, config, scheme, dynamic=dynamic, shard_bytes=10**9 if name == "bloom" else 30_000)
    model = build(quantized, config)
    if dynamic:
        compressed_tensors.quantize_inputs(layers_of(model).values())
    tokens = torch.randint(config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        ours, theirs, before = model(tokens), load(tmp_path)(tokens).logits, random_model(config)(tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert 1e-3 < (ours - before).abs().mean() < before.std(), "quantization has an effect"


def test_perplexities_report_their_progress(caplog):
    """Both on the same sequences, with a line at the end of each; on a terminal a bar."""
    config = CONFIGS["llama-tied"]
    weights = InMemory(random_model(config))
    held_out = torch.randint(config.vocab_size, (19, 9), generator=torch.Generator().manual_seed(7))
    with caplog.at_level("INFO"):
        found = scores(held_out, config, weights, QuantizedWeights(weights, config, CHANNEL, torch.float32))
    logged = [message.partition(" blocks")[0] for message in caplog.messages]
    assert logged[1:] == ["perplexity before: 2 of 2", "perplexity after: 2 of 2"]
    losses = [float(random_model(config)(row[None, :-1], targets=row[None, 1:])) for row in held_out]
    assert found["perplexity_before"] == pytest.approx(math.exp(sum(losses) / 19), rel=1e-5)


def test_models_and_sizes_that_cannot_be_quantized_are_refused():
    for name, scheme, said in (
        ("gpt", CHANNEL, "Conv1D"),
        ("mixtral", CHANNEL, "is not supported for MoE models"),
        ("llama", Scheme(4, group=32), r"stage.group_size=32: must divide the 48 inputs of blocks.0.attention.query"),
    ):
        with pytest.raises(UserError, match=said):
            check_model(CONFIGS[name], scheme, "int8")
    with pytest.raises(UserError, match=r"is supported for decoders; model.family=t5 is not one"):
        check_model(T5Config(), CHANNEL, "int8")


@pytest.mark.parametrize("bos, expected", [(None, [[3, 4, 5, 2], [2, 6, 7, 2]]), (1, [[1, 3, 4, 5], [5, 2, 1, 6]])])
def test_documents_are_joined_as_in_training(bos, expected, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("345", "67")))
    encoder: Any = SimpleNamespace(bos=bos, end_of_document=2, encode=lambda texts: [np.array([int(c) for c in text]) for text in texts])
    found = read_sequences([str(tmp_path / "texts.jsonl")], "stage.held_out", DataConfig(), encoder, tokens=100, longest=3)
    assert found.tolist() == expected
