"""A Hugging Face folder of a checkpoint: weights, configurations, and the tokenizer of the training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint import reader
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.native import INDEX
from pipeline.checkpoint.peft_format import WEIGHTS
from pipeline.common.atomic_files import digest
from pipeline.config.data import DECODER_STARTS, TokenizerConfig
from pipeline.config.stages import CheckpointReader
from pipeline.conversion import huggingface_export, imported, model_card
from pipeline.conversion.export_files import ExportWriter
from pipeline.conversion.huggingface_export import Packing
from pipeline.conversion.original import Original
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.models.config import ModelConfig


@dataclass(frozen=True)
class ExportSource:
    """What is exported.

    Attributes:
        weights: of the checkpoint.
        tokenizer: of its training.
        original: the imported model that the run started from, None for none.
    """

    weights: MergedWeights
    model: ModelConfig
    tokenizer: TextEncoder
    original: Original | None


def write(
    folder: Path,
    tokenizer: TokenizerConfig,
    source: ExportSource,
    *,
    dtype: torch.dtype,
    shard_bytes: int,
    writer: ExportWriter,
    packing: Packing | None = None,
    quantization: dict[str, Any] | None = None,
) -> int:
    """Write weights, configurations, tokenizer and license, and return the number of parameters. Collective.

    Args:
        dtype, shard_bytes, packing, writer: see huggingface_export.write_weights.
        quantization: the entry quantization_config of config.json.
    """
    parameters = huggingface_export.write_weights(
        folder,
        source.weights,
        source.model,
        dtype=dtype,
        shard_bytes=shard_bytes,
        packing=packing,
        writer=writer,
    )
    if writer.is_first:
        write_settings(folder, tokenizer, source, dtype=dtype, quantization=quantization)
    return parameters


def write_settings(
    folder: Path, tokenizer: TokenizerConfig, source: ExportSource, *, dtype: torch.dtype, quantization: dict[str, Any] | None = None
) -> None:
    """Write what is beside the weights: configurations, tokenizer, license and model card."""
    weights = source.weights
    named = weights.config.get("data", {}).get("decoder_start")
    huggingface_export.write_configs(
        folder,
        source.model,
        dtype=dtype,
        end_of_document_id=source.tokenizer.end_of_document,
        bos_id=source.tokenizer.bos,
        padding_id=source.tokenizer.first_of([named] if named else DECODER_STARTS),
        original=source.original,
        quantization=quantization,
        training=weights.config.get("training"),
    )
    copy_tokenizer(folder, tokenizer, source)
    imported.copy_terms(imported.folder_of(weights.path), folder)
    model_card.write(folder, weights, source.model)


def copy_tokenizer(folder: Path, tokenizer: TokenizerConfig, source: ExportSource) -> None:
    """Copy the tokenizer, with the chat template of the training if it had one."""
    folder.mkdir(exist_ok=True)
    huggingface_export.copy_tokenizer(
        Path(tokenizer.path), folder, end_of_document=tokenizer.end_of_document, max_positions=source.model.max_positions
    )
    huggingface_export.write_bos(folder, source.tokenizer)
    chosen = tokenizer.chat_template or source.weights.config.get("tokenizer", {}).get("chat_template")
    if chosen is not None and (template := chat_template.of(tokenizer)) is not None:
        huggingface_export.write_chat_template(folder, template)


def original_of(checkpoint: MergedWeights, model: ModelConfig, tokenizer: TextEncoder) -> Original | None:
    """Return the imported model that the run started from, with the end-of-document token of its training; None without one."""
    original = imported.original_of(imported.folder_of(checkpoint.path), tokenizer.path.parent)
    if original is not None and checkpoint.step and model.objective not in ("masked", "classification"):
        return original.with_end(tokenizer.end_of_document)
    return original


def settings_of(
    tokenizer: TokenizerConfig, stage: CheckpointReader, checkpoint: Path, encoder: TextEncoder, *, dtype: str, shard_gigabytes: float
) -> dict[str, Any]:
    """Return the settings that determine the files of an export, for its manifest.

    Args:
        dtype: of the files, as stage.dtype of stage=convert.
        shard_gigabytes: maximum size of a file.
    """
    settings = {
        "stage.checkpoint": f"{checkpoint.name} {digest(checkpoint / INDEX)}",
        "stage.dtype": dtype,
        "stage.shard_gigabytes": shard_gigabytes,
        **encoder.settings,
        "tokenizer.end_of_document": tokenizer.end_of_document,
        **reader.settings_of_weights(stage.weights),
    }
    if stage.adapter is not None:
        file = Path(stage.adapter) / WEIGHTS
        settings["stage.adapter"] = digest(file) if file.is_file() else stage.adapter
    return settings
