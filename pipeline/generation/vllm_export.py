"""The Hugging Face export that stage.engine=vllm generates from: that of stage=convert if it is there, else it is written."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from pipeline.common import artifact
from pipeline.common.errors import collect_errors
from pipeline.common.mpi import SingleProcessComm
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Convert, Generate
from pipeline.conversion import huggingface_export, huggingface_folder, stock_logits
from pipeline.conversion.export_files import export_folder, write_manifest
from pipeline.conversion.huggingface_folder import Source
from pipeline.models import registry
from pipeline.parallel.parallelize import DTYPES

log = logging.getLogger("pipeline")

KEY = "stage.export"


def folder_of(config: RunConfig, stage: Generate) -> Path:
    """Return the folder of the export: stage.export, or that of stage=convert."""
    return Path(stage.export or Path(config.run_dir) / "hf")


def check(config: RunConfig, stage: Generate, source: Source) -> bool:
    """Return whether the export exists; one in fp32 serves any precision.dtype, which vLLM rounds it to.

    Raises:
        UserError: the folder holds something else, or the checkpoint cannot be exported.
    """
    folder, precision, checkpoint = folder_of(config, stage), config.precision.dtype, source.weights.path
    if not (folder / artifact.MANIFEST).is_file():
        collect_errors(
            lambda: artifact.check_empty(folder, key=KEY, stage="convert"),
            lambda: registry.mapping_of(source.model),
            lambda: huggingface_export.check_weights(source.weights, source.model, "stage.checkpoint", checkpoint),
        )
        return False
    found = artifact.read(folder, key=KEY, stage="convert").settings
    dtype = "fp32" if found.get("stage.dtype") == "fp32" else precision
    gigabytes = found.get("stage.shard_gigabytes", Convert.shard_gigabytes)
    settings = huggingface_folder.settings_of(
        config.tokenizer,
        stage,
        checkpoint,
        source.tokenizer,
        dtype=dtype,
        shard_gigabytes=gigabytes,
    )
    artifact.find_complete(folder, key=KEY, stage="convert", settings=settings)
    return True


def prepare(config: RunConfig, stage: Generate, source: Source) -> Path:
    """Return the folder of the export, which is written, and appears at once, if it does not exist. One rank calls this.

    Raises:
        UserError: as in check.
        CheckFailed: a written file does not hold the weights of the checkpoint, or the export computes other logits.
    """
    folder = folder_of(config, stage)
    if check(config, stage, source):
        return folder
    precision, gigabytes = config.precision.dtype, Convert.shard_gigabytes
    of_checkpoint = partial(huggingface_folder.settings_of, config.tokenizer, stage, source.weights.path, source.tokenizer)
    settings = of_checkpoint(dtype=precision, shard_gigabytes=gigabytes)
    with export_folder(folder, settings, SingleProcessComm(), key=KEY) as (files, writer):
        parameters = huggingface_folder.write(
            files, config.tokenizer, source, dtype=DTYPES[precision], shard_bytes=int(gigabytes * 1e9), writer=writer
        )
        stock_logits.compare(files, source.weights, source.model, DTYPES[precision])
        write_manifest(files, writer, settings, {"step": source.weights.step, "parameters": parameters})
    log.info("generate: wrote the export %s (step %d, %s parameters)", folder, source.weights.step, f"{parameters:,}")
    return folder
