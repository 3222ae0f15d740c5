"""Export by stage=convert stage.format=gguf: one file for llama.cpp, with the tokenizer."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.common.errors import collect_errors
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Convert
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.models.config import ModelConfig
from pipeline.quantization import gguf_file
from pipeline.quantization.report import ErrorSum, Report
from pipeline.stages.convert_quantize import read_held_out, scores, write_report


def check(config: RunConfig, stage: Convert, checkpoint: MergedWeights, model: ModelConfig, tokenizer: TextEncoder) -> None:
    """Refuse what a GGUF file cannot hold.

    Raises:
        UserError: the model, its tokenizer or the type is not supported.
    """
    size = max(model.vocab_size, tokenizer.vocab_size)  # a larger tokenizer is refused elsewhere
    collect_errors(
        lambda: gguf_file.check(model, stage.quantize),
        lambda: gguf_file.read_tokens(Path(config.tokenizer.path), size, tokenizer.end_of_document),
        lambda: read_held_out(config, stage, checkpoint, tokenizer),
    )


def write(folder: Path, config: RunConfig, stage: Convert, weights: MergedWeights, model: ModelConfig, tokenizer: TextEncoder) -> int:
    """Write model.gguf, and for quantized types the report. Returns the number of parameters."""
    tokens = gguf_file.read_tokens(Path(config.tokenizer.path), model.vocab_size, tokenizer.end_of_document)
    kind = stage.dtype if stage.quantize == "none" else stage.quantize
    path = folder / gguf_file.FILE
    parameters = gguf_file.write(path, weights, model, tokens, kind=kind, name=Path(config.run_dir).name)
    if stage.quantize == "none":
        return parameters
    stored, error = gguf_file.FileWeights(path, weights, model), ErrorSum()
    for name in stored.names():
        error.add(weights.tensor(name), stored.tensor(name))
    found = scores(read_held_out(config, stage, weights, tokenizer), model, weights, stored)
    bits = 8 * stored.bytes / parameters
    report = Report(kind, "nearest", parameters, parameters, bits, 4 * parameters, stored.bytes, error.relative, **found)
    write_report(folder, report)
    return parameters
