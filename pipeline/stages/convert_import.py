"""The part of convert that imports: a Hugging Face folder -> a native checkpoint of step 0, from which pretrain continues."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

from pipeline import artifact
from pipeline.checkpoint import huggingface_import, native, save
from pipeline.checkpoint.huggingface_export import TOKENIZER_FILES
from pipeline.checkpoint.huggingface_import import ImportedWeights, StockWeights
from pipeline.config import model_option
from pipeline.config.schema import RunConfig
from pipeline.errors import UserError, together
from pipeline.files import digest, publish_folder
from pipeline.models import config_json, registry
from pipeline.models.families import FAMILIES

log = logging.getLogger("pipeline")

#: Below run_dir: the stock model's config.json and tokenizer, and the manifest that says that the import is done.
FOLDER = "imported"


def import_model(config: RunConfig, source: Path, *, file_bytes: int) -> None:
    """Write run_dir/checkpoints/step-00000000: the weights, no moments. Says the `model=` that pretrain then needs.

    Args:
        config: of the run; its model is not looked at.
        source: the Hugging Face folder.
        file_bytes: size of a file of the checkpoint.

    Raises:
        UserError: the folder's model has what no family has, its weights are not its class's, or run_dir holds another run.
    """
    content = huggingface_import.read_config(source)
    family, adapter = registry.find_adapter(content)
    model, files = together(
        lambda: config_json.read(adapter, FAMILIES[family], content),
        lambda: huggingface_import.weight_files(source),
    )
    run_dir = Path(config.run_dir)
    words = " ".join(model_option.overrides(model))
    settings = {"stage.input": {file.name: digest(file) for file in (source / "config.json", *files)}}
    if artifact.finished(run_dir / FOLDER, key="run_dir", stage="convert", settings=settings):
        log.info("convert: %s was imported before, nothing to do; continue with stage=pretrain %s", source, words)
        return
    weights = ImportedWeights(StockWeights(source, adapter), model)
    _, unused = together(lambda: _check_run(run_dir), weights.check)
    if unused:
        log.warning("convert: the model does not compute with %s; left out", ", ".join(unused))
    of_training = sorted(key for key in content if config_json.is_dropout(key) and content[key])
    if of_training:
        log.warning(
            "convert: %s is not taken over: training here has no dropout", ", ".join(f"{key}={content[key]}" for key in of_training)
        )

    described = {**dataclasses.asdict(config), "model": dataclasses.asdict(model)}
    index = native.Index(native.TrainState(), described, kinds=["weight"])
    path = save.save_whole(run_dir, index, weights.fragments(), file_bytes)
    _keep_beside(run_dir / FOLDER, source, settings, {"model": words})
    log.info("convert: wrote %s (%s); continue with stage=pretrain run_dir=%s %s", path, adapter.architecture, run_dir, words)


def _check_run(run_dir: Path) -> None:
    """An import begins a run. The checkpoint of step 0 may be there: an interrupted import wrote it."""
    found = [path for path in native.complete(run_dir) if path != native.folder_of(run_dir, 0)]
    if found:
        raise UserError.of("run_dir", run_dir, f"holds a run already, {found[-1].name}", "choose another run_dir")


def _keep_beside(folder: Path, source: Path, settings: dict[str, Any], totals: dict[str, Any]) -> None:
    """What else pretraining and a later export want of the stock model."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in ("config.json", *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    files = {file.name: artifact.entry(file) for file in sorted(partial.iterdir())}
    artifact.write(partial, artifact.Manifest("convert", settings, files, totals))
    publish_folder(partial, folder)
