"""convert: native checkpoint -> Hugging Face folder, or the reverse. Runs in a single process without GPU or process group."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pipeline.checkpoint import huggingface_export, imported, peft_format, reader
from pipeline.checkpoint.huggingface_export import Original
from pipeline.checkpoint.lora_export import export_adapter
from pipeline.checkpoint.lora_merge import MergedWeights, open_merged
from pipeline.checkpoint.native import INDEX
from pipeline.checkpoint.tokenizer import check_tokenizer, open_tokenizer
from pipeline.common import artifact
from pipeline.common.atomic_files import atomic_folder, digest
from pipeline.common.errors import collect_errors
from pipeline.common.ranks import Ranks
from pipeline.config.data import DECODER_STARTS
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Convert
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.models import config_classes, registry
from pipeline.models.config import ModelConfig
from pipeline.parallel.parallelize import DTYPES
from pipeline.quantization import export, gguf_export

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Import from `stage.input` if it is set, otherwise export. The model is read from the input; `model=` is used if that has none.

    Raises:
        UserError: the checkpoint is missing, the tokenizer does not match it, or no transformers class implements the model.
    """
    if ranks.rank > 0:
        return  # single-process stage: additional ranks do nothing
    stage, run_dir = config.stage, Path(config.run_dir)
    assert isinstance(stage, Convert)
    if stage.input is not None:
        from pipeline.checkpoint.import_model import import_model  # an export does not wait for the readers of other tools' formats

        import_model(config, Path(stage.input), file_bytes=int(stage.shard_gigabytes * 1e9))
    elif stage.format == "peft":
        export_adapter(reader.find(run_dir, stage.checkpoint), Path(stage.output or run_dir / "adapter"))
    else:
        _export(config, stage, run_dir)


def _export(config: RunConfig, stage: Convert, run_dir: Path) -> None:
    """Export full weights; errors as in run."""
    kind = "gguf" if stage.format == "gguf" else "hf"
    output = Path(stage.output or run_dir / (kind if stage.quantize == "none" else f"{kind}-{stage.quantize}"))
    path, tokenizer = collect_errors(
        lambda: reader.find(run_dir, stage.checkpoint),
        lambda: open_tokenizer(config.tokenizer, run_dir),
    )
    settings = _settings(config, stage, path, tokenizer)
    if artifact.find_complete(output, key="stage.output", stage="convert", settings=settings):
        log.info("convert: %s is complete, nothing to do (from %s)", output, path)
        return

    checkpoint = open_merged(path, stage.adapter)
    model = config_classes.from_dict(checkpoint.config["model"])
    original = _original(checkpoint, model, tokenizer)
    checks = [
        lambda: artifact.check_empty(output, key="stage.output", stage="convert"),
        lambda: check_tokenizer(config.tokenizer.path, tokenizer.vocab_size, model.vocab_size),
        lambda: huggingface_export.check_weights(checkpoint, model, "stage.checkpoint", path),
        lambda: registry.mapping_of(model),
    ]
    if stage.format == "gguf":
        checks.append(lambda: gguf_export.check(stage, config.data, checkpoint, model, tokenizer, original))
    collect_errors(*checks)
    quantized = None
    if stage.format == "huggingface" and stage.quantize != "none":
        quantized = export.prepare(stage, config.data, checkpoint, model, tokenizer)
    with atomic_folder(output) as folder:
        if stage.format == "gguf":
            parameters = gguf_export.write(folder, run_dir.name, stage, config.data, checkpoint, model, tokenizer, original)
        else:
            parameters = _write_huggingface(folder, config, stage, checkpoint, model, tokenizer, original, quantized)
        totals = {"step": checkpoint.step, "parameters": parameters}
        artifact.write(folder, artifact.Manifest("convert", settings, artifact.entries(folder), totals))
    log.info("convert: wrote %s (step %d, %s parameters)", output, checkpoint.step, f"{parameters:,}")


def _settings(config: RunConfig, stage: Convert, path: Path, tokenizer: TextEncoder) -> dict[str, Any]:
    """Return all settings that determine the exported files."""
    settings = {
        "stage.checkpoint": f"{path.name} {digest(path / INDEX)}",
        "stage.dtype": stage.dtype,
        "stage.shard_gigabytes": stage.shard_gigabytes,
        "tokenizer.path": tokenizer.fingerprint,
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
        **({"stage.format": "gguf"} if stage.format == "gguf" else {}),
        **export.settings_of(stage),
    }
    if stage.adapter is not None:
        file = Path(stage.adapter) / peft_format.WEIGHTS
        settings["stage.adapter"] = digest(file) if file.is_file() else stage.adapter
    return settings


def _write_huggingface(
    folder: Path,
    config: RunConfig,
    stage: Convert,
    checkpoint: MergedWeights,
    model: ModelConfig,
    tokenizer: TextEncoder,
    original: Original | None,
    quantized: export.Quantization | None,
) -> int:
    """Write the files of a Hugging Face folder, with quantized weights if there are some. Returns the number of parameters."""
    dtype, tokenizer_folder = DTYPES[stage.dtype], Path(config.tokenizer.path)
    packing, entry = (quantized.packing, quantized.config_json) if quantized else (None, None)
    shard_bytes = int(stage.shard_gigabytes * 1e9)
    parameters = huggingface_export.write_weights(folder, checkpoint, model, dtype=dtype, shard_bytes=shard_bytes, packing=packing)
    if quantized:
        export.measure(folder, stage, checkpoint, quantized, model, parameters)
    named = checkpoint.config.get("data", {}).get("decoder_start")
    huggingface_export.write_configs(
        folder,
        model,
        dtype=dtype,
        end_of_document_id=tokenizer.end_of_document,
        padding_id=tokenizer.first_of([named] if named else DECODER_STARTS),
        original=original,
        quantization=entry,
        training=checkpoint.config.get("training"),
    )
    huggingface_export.copy_tokenizer(
        tokenizer_folder, folder, end_of_document=config.tokenizer.end_of_document, max_positions=model.max_positions
    )
    chosen = config.tokenizer.chat_template or checkpoint.config.get("tokenizer", {}).get("chat_template")
    if chosen is not None and (template := chat_template.of(config.tokenizer)) is not None:
        huggingface_export.write_chat_template(folder, template)
    imported.copy_terms(imported.folder_of(checkpoint.path), folder)
    return parameters


def _original(checkpoint: MergedWeights, model: ModelConfig, tokenizer: TextEncoder) -> Original | None:
    """Return the imported model that the run started from, with the end-of-document token of its training; None without one."""
    original = imported.original_of(imported.folder_of(checkpoint.path), tokenizer.path.parent)
    if original is not None and checkpoint.step and model.objective not in ("masked", "classification"):
        return original.with_end(tokenizer.end_of_document)
    return original
