"""Export by stage=convert stage.format=gguf: one file for llama.cpp, with the tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.common.errors import UserError, collect_errors
from pipeline.config.data import DataConfig
from pipeline.config.stages import Convert
from pipeline.conversion import stock_logits
from pipeline.conversion.export_files import ExportWriter
from pipeline.conversion.original import Original, token_ids
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.models.config import ModelConfig
from pipeline.quantization import gguf_architectures, gguf_file
from pipeline.quantization.export import read_held_out, scores, write_report
from pipeline.quantization.gguf_tokens import read_tokens
from pipeline.quantization.report import ErrorSum, QuantizationReport


def check(
    stage: Convert, data: DataConfig, weights: MergedWeights, model: ModelConfig, tokenizer: TextEncoder, original: Original | None
) -> None:
    """Refuse what a GGUF file cannot hold; arguments as those of write.

    Raises:
        UserError: the model, its tokenizer or the type is not supported.
    """
    if stage.held_out and (beside := getattr(model, "beside_hidden_states", "")):
        rule = f"is not supported with {beside}: the perplexity is computed a block at a time"
        raise UserError.of("stage.held_out", stage.held_out, rule, "remove stage.held_out")
    size = max(model.vocab_size, tokenizer.vocab_size)  # a larger tokenizer is refused elsewhere
    collect_errors(
        lambda: gguf_file.check(model, stage.quantize),
        lambda: read_tokens(tokenizer, size, token_ids(original, tokenizer)),
        lambda: read_held_out(stage, data, weights, tokenizer),
    )


def write(
    folder: Path,
    name: str,
    stage: Convert,
    data: DataConfig,
    weights: MergedWeights,
    model: ModelConfig,
    tokenizer: TextEncoder,
    original: Original | None,
    writer: ExportWriter,
    device: torch.device,
) -> int:
    """Write model.gguf, compare its logits, and write the report of quantized types. Collective.

    Args:
        folder: existing output folder.
        name: of the model in the file.
        stage: the settings of the export.
        data: options of reading stage.held_out.
        weights: of the checkpoint.
        original: the imported model that the run started from, None for none.
        writer: writes the file.
        device: that computes the perplexity.

    Returns:
        Number of parameters.

    Raises:
        UserError: a weight is too large for fp16.
        CheckFailed: the file does not hold the weights of the checkpoint, or transformers computes other logits from it.
    """
    tokens = read_tokens(tokenizer, model.vocab_size, token_ids(original, tokenizer))
    kind = stage.dtype if stage.quantize == "none" else stage.quantize
    parameters = gguf_file.write(folder, weights, model, tokens, kind=kind, name=name, writer=writer)
    if not writer.is_first:
        return parameters
    stored, error = gguf_file.FileWeights(folder / gguf_file.FILE, weights, model), ErrorSum()
    if gguf_architectures.is_read_by_transformers(model):
        stock_logits.compare(folder, stored, model, torch.float32, gguf_file=gguf_file.FILE)
    if stage.quantize == "none":
        return parameters
    for weight in stored.names():
        error.add(weights.tensor(weight), stored.tensor(weight))
    measured = scores(read_held_out(stage, data, weights, tokenizer), model, weights, stored, device=device)
    bits = 8 * stored.bytes / parameters
    report = QuantizationReport(kind, "nearest", parameters, parameters, bits, 4 * parameters, stored.bytes, error.relative, **measured)
    write_report(folder, report)
    return parameters
