"""convert: a native checkpoint -> a Hugging Face folder. One process, no GPU, no process group."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from pipeline import artifact
from pipeline.checkpoint import huggingface, reader
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Convert
from pipeline.errors import UserError
from pipeline.files import publish_folder
from pipeline.launch.ranks import Ranks
from pipeline.models import registry
from pipeline.parallel.apply import DTYPES

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Export the configured checkpoint. The model is the checkpoint's; `model=` need not be repeated.

    Raises:
        UserError: there is no checkpoint, or it and the tokenizer contradict each other.
    """
    if ranks.rank > 0:
        return  # the work is one process's, however many were started
    stage = config.stage
    assert isinstance(stage, Convert)
    path = reader.find(Path(config.run_dir), stage.checkpoint)
    output = Path(stage.output or Path(config.run_dir) / "hf")
    settings = {
        "stage.checkpoint": str(path.resolve()),
        "stage.dtype": stage.dtype,
        "stage.shard_gigabytes": stage.shard_gigabytes,
        "tokenizer.path": config.tokenizer.path,
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
    }
    if artifact.finished(output, key="stage.output", stage="convert", settings=settings):
        log.info("convert: %s is already there, from %s", output, path)
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError.of("stage.output", output, "exists and no convert made it", "name another folder, or remove this one")

    checkpoint = reader.Checkpoint(path)
    model = registry.from_dict(checkpoint.config["model"])
    huggingface.check_weights(checkpoint, model, "stage.checkpoint", path)
    tokenizer = Path(config.tokenizer.path)
    violations, end_id = huggingface.check_tokenizer(tokenizer, config.tokenizer.end_of_document, model.vocab_size)
    if end_id is None or violations:
        raise UserError(violations)

    dtype = DTYPES[stage.dtype]
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what an interrupted run left behind
    partial.mkdir(parents=True)
    parameters = huggingface.write_weights(partial, checkpoint, model, dtype=dtype, shard_bytes=int(stage.shard_gigabytes * 1e9))
    huggingface.write_configs(partial, model, dtype=dtype, end_of_document_id=end_id)
    huggingface.copy_tokenizer(tokenizer, partial, end_of_document=config.tokenizer.end_of_document, max_positions=model.max_positions)
    artifact.write(
        partial,
        artifact.Manifest(
            stage="convert",
            settings=settings,
            files={file.name: artifact.entry(file) for file in sorted(partial.iterdir())},
            totals={"step": checkpoint.step, "parameters": parameters},
        ),
    )
    publish_folder(partial, output)
    log.info("convert: step %d, %s parameters -> %s", checkpoint.step, f"{parameters:,}", output)
