"""convert: native checkpoint -> formats of other tools; or a folder of another tool -> native. No process group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.checkpoint import reader
from pipeline.checkpoint.lora_merge import export_adapter, open_merged
from pipeline.checkpoint.newest import read_newest
from pipeline.common import artifact, mpi
from pipeline.common.atomic_files import report_disk_full
from pipeline.common.errors import collect_errors
from pipeline.common.mpi import Comm, SingleProcessComm
from pipeline.common.ranks import Ranks
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Convert
from pipeline.conversion import (
    consolidated_export,
    huggingface_export,
    huggingface_folder,
    megatron_export,
    megatron_layout,
    stock_logits,
    universal_export,
)
from pipeline.conversion.export_files import ExportWriter, export_folder, write_manifest
from pipeline.conversion.huggingface_folder import ExportSource, original_of
from pipeline.conversion.tokenizer import check_tokenizer, open_tokenizer
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.models import config_classes, registry
from pipeline.parallel import device
from pipeline.parallel.parallelize import DTYPES
from pipeline.quantization import export, gguf_export
from pipeline.training.lr_schedule import next_rate

log = logging.getLogger("pipeline")


#: stage.format -> the default output folder in run_dir.
OUTPUTS = {"huggingface": "hf", "gguf": "gguf", "consolidated": "consolidated", "megatron": "megatron", "deepspeed_universal": "universal"}


def run(config: RunConfig, ranks: Ranks) -> None:
    """Import from `stage.input` if it is set, otherwise export. The model is read from the input; `model=` is used if that has none.

    Raises:
        UserError: the checkpoint is missing, the tokenizer does not match it, or the format does not support the model.
        CheckFailed: a written file does not hold the weights of the checkpoint, or the export computes other logits.
    """
    stage, run_dir = config.stage, Path(config.run_dir)
    assert isinstance(stage, Convert)
    if stage.input is None and stage.format != "peft":
        output = Path(stage.output or run_dir / "-".join([OUTPUTS[stage.format], stage.quantize]).removesuffix("-none"))
        if ranks.launcher == "torchrun":  # whose ranks have no MPI
            if ranks.rank > 0:
                return
            ranks = Ranks()
        with mpi.world(ranks, output) as comm:
            read_newest(lambda: _find(config, stage, output, comm), partial(_export, config, stage, output, comm), ranks=comm.size)
    elif ranks.rank > 0:
        return  # what follows runs in a single process
    elif stage.input is not None:
        from pipeline.conversion.import_model import import_model  # an export does not wait for the readers of other tools' formats

        with report_disk_full(run_dir):
            import_model(config, Path(stage.input), file_bytes=int(stage.shard_gigabytes * 1e9))
    else:
        output = Path(stage.output or run_dir / "adapter")
        with report_disk_full(output):
            read_newest(lambda: [reader.find(run_dir, stage.checkpoint)], lambda path: export_adapter(path, output, stage.weights))


def _export(config: RunConfig, stage: Convert, output: Path, comm: Comm, path: Path | None = None) -> None:
    """Export full weights of a checkpoint, if one is given; errors as in run. Collective."""
    if path is None:
        return
    tokenizer = open_tokenizer(config.tokenizer, Path(config.run_dir))
    weights = open_merged(reader.with_weights(reader.Checkpoint(path), stage.weights), stage.adapter)
    model = config_classes.from_dict(weights.config["model"])
    source = ExportSource(weights, model, tokenizer, original_of(weights, model, tokenizer))
    samples = _check(config, stage, output, source) if comm.rank == 0 else None
    if comm.bcast(samples is not None):
        if comm.rank > 0:
            return  # integer weights are computed, and written, by one rank
        comm = SingleProcessComm()
    settings = _settings(config, stage, path, tokenizer)
    with export_folder(output, settings, comm) as (folder, writer):
        if samples:
            writer = ExportWriter()  # without records: its report counts what is written in one run
        parameters = _write(folder, config, stage, source, samples, writer)
        if writer.is_first:
            if stage.format == "huggingface" and samples is None:
                stock_logits.compare(folder, weights, model, DTYPES[stage.dtype])
            write_manifest(folder, writer, settings, {"step": weights.step, "parameters": parameters})
    log.info("convert: wrote %s (step %d, %s parameters)", output, weights.step, f"{parameters:,}")


def _find(config: RunConfig, stage: Convert, output: Path, comm: Comm) -> list[Path]:
    """Return the checkpoint to export; none if its export is complete. Collective."""
    paths: list[Path] = comm.bcast(_unfinished(config, stage, output) if comm.rank == 0 else None)
    return paths


def _unfinished(config: RunConfig, stage: Convert, output: Path) -> list[Path]:
    """What _find returns, as rank 0 finds it."""
    path, tokenizer = collect_errors(
        lambda: reader.find(Path(config.run_dir), stage.checkpoint),
        lambda: open_tokenizer(config.tokenizer, Path(config.run_dir)),
    )
    settings = _settings(config, stage, path, tokenizer)
    if artifact.find_complete(output, key="stage.output", stage="convert", settings=settings):
        log.info("convert: %s is complete, nothing to do (from %s)", output, path)
        return []
    return [path]


def _check(config: RunConfig, stage: Convert, output: Path, source: ExportSource) -> export.CalibrationSamples | None:
    """Refuse what cannot be exported, and return the token sequences of an export with integer weights."""
    weights, model, tokenizer = source.weights, source.model, source.tokenizer
    checks: list[Callable[[], object]] = [
        lambda: artifact.check_empty(output, key="stage.output", stage="convert"),
        lambda: check_tokenizer(tokenizer, weights, model.vocab_size),
        lambda: huggingface_export.check_weights(weights, model, "stage.checkpoint", weights.path),
    ]
    if stage.format in ("huggingface", "gguf", "deepspeed_universal"):
        checks.append(lambda: registry.mapping_of(model))
    if stage.format == "gguf":
        checks.append(lambda: gguf_export.check(stage, config.data, weights, model, tokenizer, source.original))
    if stage.format == "megatron":
        checks.append(lambda: megatron_layout.check(model))
    collect_errors(*checks)
    if stage.format == "deepspeed_universal":
        universal_export.check(weights, model)
    if stage.format == "huggingface" and stage.quantize != "none":
        return export.check(stage, config.data, weights, model, tokenizer)
    return None


def _write(
    folder: Path, config: RunConfig, stage: Convert, source: ExportSource, samples: export.CalibrationSamples | None, writer: ExportWriter
) -> int:
    """Write the files of an export. Returns the number of parameters. Collective."""
    dtype, shard_bytes = DTYPES[stage.dtype], int(stage.shard_gigabytes * 1e9)
    if samples:
        return _write_quantized(folder, config, stage, source, samples, writer)
    if stage.format == "huggingface":
        return huggingface_folder.write(folder, config.tokenizer, source, dtype=dtype, shard_bytes=shard_bytes, writer=writer)
    if stage.format == "gguf":
        name = Path(config.run_dir).name
        return gguf_export.write(
            folder, name, stage, config.data, source.weights, source.model, source.tokenizer, source.original, writer, device.choose(0)
        )
    if stage.format == "deepspeed_universal":
        state = source.weights.train_state
        rate = next_rate(source.weights.config, state.updates) if state.samples else 0.0  # 0: an imported model, which was not trained here
        parameters = universal_export.write(folder, source.weights, source.model, rate, writer)
        if writer.is_first:
            huggingface_folder.write_settings(folder, config.tokenizer, source, dtype=dtype)
        return parameters
    if writer.is_first:
        huggingface_folder.copy_tokenizer(folder / "tokenizer", config.tokenizer, source)
    if stage.format == "consolidated":
        return consolidated_export.write(folder, source.weights, dtype=dtype, writer=writer)
    # Megatron-LM takes a relative path as one below its working directory, or as the name of a model on the Hub.
    tokenizer = str(Path(stage.output or Path(config.run_dir) / OUTPUTS["megatron"]).absolute() / "tokenizer")
    return megatron_export.write(
        folder, source.weights, source.model, dtype=dtype, shard_bytes=shard_bytes, tokenizer=tokenizer, writer=writer
    )


def _write_quantized(
    folder: Path, config: RunConfig, stage: Convert, source: ExportSource, samples: export.CalibrationSamples, writer: ExportWriter
) -> int:
    """Write the files of an export with integer weights, by one rank, and its report. Returns the number of parameters."""
    dtype, shard_bytes, target = DTYPES[stage.dtype], int(stage.shard_gigabytes * 1e9), device.choose(0)
    with export.prepared(stage, samples, source.weights, source.model, folder.with_name("layers"), target) as quantized:
        parameters = huggingface_folder.write(
            *(folder, config.tokenizer, source),
            dtype=dtype,
            shard_bytes=shard_bytes,
            packing=quantized.packing,
            quantization=quantized.config_json,
            writer=writer,
        )
        held_out = samples.held_out
        export.measure(folder, stage, source.weights, quantized, source.model, held_out=held_out, parameters=parameters, device=target)
    return parameters


def _settings(config: RunConfig, stage: Convert, path: Path, tokenizer: TextEncoder) -> dict[str, Any]:
    """Return all settings that determine the exported files."""
    common = huggingface_folder.settings_of(
        config.tokenizer, stage, path, tokenizer, dtype=stage.dtype, shard_gigabytes=stage.shard_gigabytes
    )
    return common | ({"stage.format": stage.format} if stage.format != "huggingface" else {}) | export.settings_of(stage)
