"""Quantized weights of an export (stage=convert stage.quantize): integers for the format compressed-tensors, and a report."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn

from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.weights import Weights
from pipeline.common.errors import collect_errors
from pipeline.common.progress import Progress
from pipeline.config.data import DataConfig
from pipeline.config.stages import Convert
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.layers.lora import linear_layers
from pipeline.layers.uniform_quantization import QuantizedMatrix, Scheme
from pipeline.models.config import ModelConfig
from pipeline.parallel.parallelize import DTYPES
from pipeline.quantization import compressed_tensors, gptq
from pipeline.quantization.blocks import CPU, BlockByBlock
from pipeline.quantization.calibration_text import read_sequences
from pipeline.quantization.quantized_weights import QuantizedWeights, check_model, quantized_layers
from pipeline.quantization.report import ErrorSum, QuantizationReport

log = logging.getLogger("pipeline")

REPORT = "quantization.json"


@dataclass(frozen=True)
class CalibrationSamples:
    """The token sequences of a quantized export.

    Attributes:
        calibration: of stage.calibration, None for none.
        held_out: of stage.held_out, for the perplexity, None for none.
    """

    calibration: Tensor | None
    held_out: Tensor | None


@dataclass(frozen=True)
class Quantization:
    """The quantized weights of an export.

    Attributes:
        weights: their dequantized values.
        packing: how they are stored.
        config_json: the entry quantization_config of config.json.
    """

    weights: QuantizedWeights
    packing: compressed_tensors.QuantizedTensors
    config_json: dict[str, Any]


def scheme_of(stage: Convert) -> Scheme:
    """Return how the settings quantize matrices."""
    if stage.quantize == "int4":
        return Scheme(4, stage.symmetric, group=stage.group_size)
    return Scheme(8, stage.symmetric, per_tensor=stage.granularity == "tensor")


def settings_of(stage: Convert) -> dict[str, Any]:
    """Return the settings that determine the quantized weights, for the manifest."""
    if stage.quantize == "none":
        return {}
    names = ("quantize", "symmetric", "granularity", "group_size", "rounding", "calibration", "held_out", "sample_tokens")
    return {f"stage.{name}": getattr(stage, name) for name in names}


def check(stage: Convert, data: DataConfig, weights: MergedWeights, model: ModelConfig, tokenizer: TextEncoder) -> CalibrationSamples:
    """Refuse what cannot be quantized, and read the documents.

    Args:
        stage: the settings of the export.
        data: options of reading stage.calibration and stage.held_out.
        weights: of the checkpoint.

    Raises:
        UserError: the model cannot be quantized with these settings, a package is missing, or documents cannot be read.
    """
    *_, calibration, held_out = collect_errors(
        lambda: compressed_tensors.check_installed(stage.quantize),
        lambda: check_model(model, scheme_of(stage), stage.quantize),
        lambda: _sequences("calibration", stage, data, weights, tokenizer),
        lambda: read_held_out(stage, data, weights, tokenizer),
    )
    return CalibrationSamples(calibration, held_out)


@contextmanager
def prepared(
    stage: Convert, samples: CalibrationSamples, weights: Weights, model: ModelConfig, folder: Path, device: torch.device
) -> Iterator[Quantization]:
    """Yield the quantized weights of a model.

    Args:
        stage: the settings of the export.
        samples: as check returns them.
        weights: of the checkpoint.
        folder: for what GPTQ chooses, until the end of the block.
        device: that computes.
    """
    scheme, dtype = scheme_of(stage), DTYPES[stage.dtype]
    solved = SolvedLayers(folder)
    try:
        if samples.calibration is not None:
            sequences = samples.calibration[:, :-1]
            log.info("convert: GPTQ calibrates with %s tokens on %s", f"{sequences.numel():,}", device)
            for layer, weight in gptq.solve(BlockByBlock(weights, model, device), sequences, scheme, dtype):
                solved.add(layer, weight)
        quantized = QuantizedWeights(weights, model, scheme, dtype, solved)
        dynamic = stage.quantize == "int8_dynamic"
        packing = compressed_tensors.QuantizedTensors(quantized, model, dynamic=dynamic, dtype=dtype)
        yield Quantization(quantized, packing, compressed_tensors.quantization_config(model, scheme, dynamic=dynamic))
    finally:
        shutil.rmtree(folder)


def measure(
    folder: Path,
    stage: Convert,
    weights: Weights,
    quantization: Quantization,
    model: ModelConfig,
    *,
    held_out: Tensor | None,
    parameters: int,
    device: torch.device,
) -> None:
    """Measure what quantization has changed, and write the report to an export."""
    layers = quantized_layers(model)
    error = ErrorSum()
    for layer in layers:
        error.add(weights.tensor(f"{layer}.weight"), quantization.weights.tensor(f"{layer}.weight"))
    count = sum(outputs * inputs for outputs, inputs in layers.values())
    before, after = parameters * DTYPES[stage.dtype].itemsize, sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    bits = 8 * quantization.packing.stored_bytes / count
    dynamic = stage.quantize == "int8_dynamic"
    measured = scores(held_out, model, weights, quantization.weights, dynamic=dynamic, device=device)
    write_report(
        folder, QuantizationReport(stage.quantize, stage.rounding, parameters, count, bits, before, after, error.relative, **measured)
    )


def read_held_out(stage: Convert, data: DataConfig, checkpoint: MergedWeights, tokenizer: TextEncoder) -> Tensor | None:
    """Return the token sequences of stage.held_out, None without it."""
    return _sequences("held_out", stage, data, checkpoint, tokenizer)


def scores(
    held_out: Tensor | None, model: ModelConfig, before: Weights, after: Weights, *, dynamic: bool = False, device: torch.device = CPU
) -> dict[str, Any]:
    """Return the perplexities of a report.

    Args:
        held_out: token sequences, None for none.
        model: the model configuration.
        before, after: the original and the quantized weights.
        dynamic: inputs of the quantized layers are quantized, too.
        device: that computes.
    """
    if held_out is None:
        return {}
    log.info("convert: measuring the perplexity on %s tokens, before and after", f"{held_out[:, 1:].numel():,}")
    original = perplexity(BlockByBlock(before, model, device), held_out, "perplexity before")
    quantized = BlockByBlock(after, model, device, _quantize_inputs if dynamic else None)
    return {
        "perplexity_before": original,
        "perplexity_after": perplexity(quantized, held_out, "perplexity after"),
        "held_out_tokens": held_out[:, 1:].numel(),
    }


def _quantize_inputs(block: nn.Module) -> None:
    """Round the inputs of the quantized layers of a block."""
    compressed_tensors.quantize_inputs(layer for _, layer in linear_layers(block))


def write_report(folder: Path, report: QuantizationReport) -> None:
    """Write quantization.json, and log it."""
    (folder / REPORT).write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")
    log.info("convert: %s", report.text())


def _sequences(key: str, stage: Convert, data: DataConfig, checkpoint: MergedWeights, tokenizer: TextEncoder) -> Tensor | None:
    """Return the token sequences of stage.calibration or stage.held_out, None without documents. They are as long as those of training."""
    if not (inputs := getattr(stage, key)):
        return None
    length: int = checkpoint.config["model"]["max_positions"]
    if checkpoint.step:  # else it is an imported model, and the settings are not those of its training
        length = min(length, checkpoint.config["training"]["sequence_length"])
    return read_sequences(inputs, f"stage.{key}", data, tokenizer, tokens=stage.sample_tokens, longest=length)


def perplexity(model: BlockByBlock, sequences: Tensor, label: str) -> float:
    """Return exp of the mean loss of the next token.

    Args:
        model: a decoder.
        sequences: int64 (sequences, length + 1).
        label: name of the task in the progress report.
    """
    hidden, total = model.embed(sequences[:, :-1]), 0.0
    with Progress(len(model), label, "blocks") as progress:
        for name, block in model.blocks():
            model.apply(block, hidden)
            progress.advance(1, name)
    for loss, batch in zip(model.losses(hidden, sequences[:, 1:]), hidden, strict=True):
        total += loss * len(batch)
    return math.exp(min(total / len(sequences), 700.0))


class SolvedLayers(Mapping[str, QuantizedMatrix]):
    """Name of a layer -> its quantized weight, read from the file when it is wanted.

    Args:
        folder: for the files; it may exist.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._names: dict[str, None] = {}

    def add(self, layer: str, weight: QuantizedMatrix) -> None:
        """Write a layer."""
        parts = {"codes": weight.codes, "scale": weight.scale, "zero_point": weight.zero_point}
        save_file({name: part.contiguous() for name, part in parts.items()}, self._path(layer))
        self._names[layer] = None

    def __getitem__(self, layer: str) -> QuantizedMatrix:
        """Read a layer."""
        if layer not in self._names:
            raise KeyError(layer)
        return QuantizedMatrix(**load(self._path(layer).read_bytes()))

    def __contains__(self, layer: object) -> bool:
        """Whether a layer was written."""
        return layer in self._names

    def __iter__(self) -> Iterator[str]:
        """Names in the order in which they were written."""
        return iter(self._names)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._names)

    def _path(self, layer: str) -> Path:
        return self._folder / f"{layer}.safetensors"
