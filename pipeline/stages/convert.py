"""convert: native checkpoint -> Hugging Face folder, or the reverse. Runs in a single process without GPU or process group."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from pipeline.checkpoint import huggingface_export, peft_format, reader
from pipeline.checkpoint.huggingface_export import Original
from pipeline.checkpoint.lora_adapter import Adapter, adapter_of, base_hash, lora_of, saved_weights
from pipeline.checkpoint.lora_merge import MergedWeights, open_merged
from pipeline.checkpoint.native import INDEX
from pipeline.common import artifact
from pipeline.common.errors import UserError, collect_errors
from pipeline.common.files import atomic_folder, digest
from pipeline.common.ranks import Ranks
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Convert
from pipeline.data.load.objectives.encoder_decoder import DECODER_STARTS
from pipeline.data.tokenize.tokenizer import TextEncoder, load
from pipeline.models import config_classes, registry
from pipeline.models.config import ModelConfig
from pipeline.parallel.parallelize import DTYPES
from pipeline.stages import convert_gguf, convert_quantize
from pipeline.stages.convert_import import FOLDER, import_model

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Import from `stage.input` if it is set, otherwise export. The model is read from the input; `model=` is not required."""
    if ranks.rank > 0:
        return  # single-process stage: additional ranks do nothing
    stage = config.stage
    assert isinstance(stage, Convert)
    if stage.input is None:
        export_model(config, stage)
    else:
        import_model(config, Path(stage.input), file_bytes=int(stage.shard_gigabytes * 1e9))


def export_model(config: RunConfig, stage: Convert) -> None:
    """Export the configured checkpoint to a Hugging Face folder.

    Raises:
        UserError: the checkpoint is missing, the tokenizer does not match it, or no transformers class implements the model.
    """
    if stage.format == "peft":
        export_adapter(config, stage)
        return
    kind = "gguf" if stage.format == "gguf" else "hf"
    output = Path(stage.output or Path(config.run_dir) / (kind if stage.quantize == "none" else f"{kind}-{stage.quantize}"))
    path, tokenizer = collect_errors(
        lambda: reader.find(Path(config.run_dir), stage.checkpoint),
        lambda: open_tokenizer(config),
    )
    settings = {
        "stage.checkpoint": f"{path.name} {digest(path / INDEX)}",
        "stage.dtype": stage.dtype,
        "stage.shard_gigabytes": stage.shard_gigabytes,
        "tokenizer.path": tokenizer.fingerprint,
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
        **({"stage.format": "gguf"} if stage.format == "gguf" else {}),
        **convert_quantize.settings_of(stage),
    }
    if stage.adapter is not None:
        file = Path(stage.adapter) / peft_format.WEIGHTS
        settings["stage.adapter"] = digest(file) if file.is_file() else stage.adapter
    if artifact.find_complete(output, key="stage.output", stage="convert", settings=settings):
        log.info("convert: %s is complete, nothing to do (from %s)", output, path)
        return

    checkpoint = open_merged(path, stage.adapter)
    model = config_classes.from_dict(checkpoint.config["model"])
    collect_errors(
        lambda: _check_output(output),
        lambda: _check_vocabulary(config.tokenizer.path, tokenizer.vocab_size, model.vocab_size),
        lambda: huggingface_export.check_weights(checkpoint, model, "stage.checkpoint", path),
        lambda: registry.mapping_of(model),
        *([lambda: convert_gguf.check(config, stage, checkpoint, model, tokenizer)] if stage.format == "gguf" else []),
    )
    quantized = None
    if stage.format == "huggingface" and stage.quantize != "none":
        quantized = convert_quantize.prepare(config, stage, checkpoint, model, tokenizer)
    with atomic_folder(output) as folder:
        if stage.format == "gguf":
            parameters = convert_gguf.write(folder, config, stage, checkpoint, model, tokenizer)
        else:
            parameters = _write_huggingface(folder, config, stage, checkpoint, model, tokenizer, quantized)
        files = {file.name: artifact.entry(file) for file in sorted(folder.iterdir())}
        artifact.write(folder, artifact.Manifest("convert", settings, files, {"step": checkpoint.step, "parameters": parameters}))
    log.info("convert: wrote %s (step %d, %s parameters)", output, checkpoint.step, f"{parameters:,}")


def _write_huggingface(
    folder: Path,
    config: RunConfig,
    stage: Convert,
    checkpoint: MergedWeights,
    model: ModelConfig,
    tokenizer: TextEncoder,
    quantized: convert_quantize.Quantization | None,
) -> int:
    """Write the files of an export, with quantized weights if there are some. Returns the number of parameters."""
    dtype, tokenizer_folder = DTYPES[stage.dtype], Path(config.tokenizer.path)
    packing, entry = (quantized.packing, quantized.config_json) if quantized else (None, None)
    shard_bytes = int(stage.shard_gigabytes * 1e9)
    parameters = huggingface_export.write_weights(folder, checkpoint, model, dtype=dtype, shard_bytes=shard_bytes, packing=packing)
    if quantized:
        convert_quantize.measure(folder, stage, checkpoint, quantized, model, parameters)
    named = checkpoint.config.get("data", {}).get("decoder_start")
    padding = tokenizer.first_of([named] if named else DECODER_STARTS)
    original = imported_original(Path(config.run_dir) / FOLDER, tokenizer_folder)
    huggingface_export.write_configs(
        folder,
        model,
        dtype=dtype,
        end_of_document_id=tokenizer.end_of_document,
        padding_id=padding,
        original=original,
        quantization=entry,
    )
    huggingface_export.copy_tokenizer(
        tokenizer_folder, folder, end_of_document=config.tokenizer.end_of_document, max_positions=model.max_positions
    )
    return parameters


def export_adapter(config: RunConfig, stage: Convert) -> None:
    """Export the adapter of the configured checkpoint in PEFT's format.

    Raises:
        UserError: the checkpoint is missing or has no adapter, or no transformers class implements the model.
    """
    output = Path(stage.output or Path(config.run_dir) / "adapter")
    path = reader.find(Path(config.run_dir), stage.checkpoint)
    settings = {"stage.checkpoint": f"{path.name} {digest(path / INDEX)}", "stage.format": stage.format}
    if artifact.find_complete(output, key="stage.output", stage="convert", settings=settings):
        log.info("convert: %s is complete, nothing to do (from %s)", output, path)
        return
    checkpoint = reader.Checkpoint(path)
    model = config_classes.from_dict(checkpoint.config["model"])
    if getattr(model, "labels", []):
        rule = "would leave out the head of the classifier, which is trained beside the adapter"
        raise UserError.of("stage.format", "peft", rule, "remove it: without it, the adapter is merged into full weights")
    found, *_ = collect_errors(lambda: _adapter(checkpoint), lambda: _check_output(output), lambda: registry.mapping_of(model))
    saved = saved_weights(checkpoint)
    found = replace(found, saved=saved)
    if lora_of(checkpoint.config).quantize == "none":  # else the checkpoint has the rounded weights of its base
        found = replace(found, base=base_hash(checkpoint, model, saved))
    base = checkpoint.config["checkpoint"].get("initialize_from") or ""
    with atomic_folder(output) as folder:
        dropout = lora_of(checkpoint.config).dropout
        parameters = peft_format.write_peft(folder, found, model, dropout=dropout, base_name=base)
        files = {file.name: artifact.entry(file) for file in sorted(folder.iterdir())}
        artifact.write(folder, artifact.Manifest("convert", settings, files, {"step": checkpoint.step, "parameters": parameters}))
    log.info("convert: wrote %s (step %d, an adapter with %s parameters)", output, checkpoint.step, f"{parameters:,}")


def _adapter(checkpoint: reader.Checkpoint) -> Adapter:
    """Return the adapter of a checkpoint; refuse a checkpoint without one."""
    if (found := adapter_of(checkpoint)) is None:
        rule = f"requires an adapter, and {checkpoint.path} has none"
        raise UserError.of("stage.format", "peft", rule, "choose a run with lora.rank above 0, or stage.format=huggingface")
    return found


def open_tokenizer(config: RunConfig) -> TextEncoder:
    """Open the tokenizer.

    Raises:
        UserError: tokenizer.path holds none.
    """
    path, imported = Path(config.tokenizer.path), Path(config.run_dir) / FOLDER
    if not (path / "tokenizer.json").is_file() and (imported / "tokenizer.json").is_file():
        fix = f"set tokenizer.path={imported}, the tokenizer of the imported model, or the one of the training data"
        raise UserError.of("tokenizer.path", path, "holds no tokenizer.json", fix)
    return TextEncoder(path, config.tokenizer.end_of_document)


def imported_original(folder: Path, tokenizer_folder: Path) -> Original | None:
    """Return what the export keeps of an imported model; None if the run has none, or has trained it with another vocabulary."""
    if not (folder / "config.json").is_file():
        return None
    if (folder / "tokenizer.json").is_file() and _vocabulary(folder) != _vocabulary(tokenizer_folder):
        log.warning("convert: token ids and generation_config.json of the imported model are not exported: the tokenizer is another one")
        return None
    return huggingface_export.read_original(folder)


def _vocabulary(folder: Path) -> dict[str, int]:
    """Return token -> id."""
    found: dict[str, int] = load(folder).get_vocab(with_added_tokens=True)
    return found


def _check_output(output: Path) -> None:
    """Refuse to replace files that convert did not write."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError.of(
            "stage.output",
            output,
            "contains files that stage=convert did not write",
            "set stage.output to another folder, or remove this one",
        )


def _check_vocabulary(path: str, entries: int, rows: int) -> None:
    """Refuse a tokenizer with more ids than rows of the embedding."""
    if entries > rows:
        rule = f"has {entries} entries, which exceeds model.vocab_size={rows} of the checkpoint"
        raise UserError.of("tokenizer.path", path, rule, "set it to the tokenizer of the training run")
