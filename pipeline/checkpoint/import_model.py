"""Import by stage=convert: Hugging Face folder -> native checkpoint of step 0, from which pretrain continues."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from pipeline.checkpoint import huggingface_import, native, save
from pipeline.checkpoint.huggingface_import import ImportedWeights, StockWeights
from pipeline.checkpoint.imported import FOLDER, copy_originals
from pipeline.common import artifact, knobs
from pipeline.common.atomic_files import digest
from pipeline.common.errors import UserError, collect_errors
from pipeline.config import model_option, run_tokenizer
from pipeline.config.schema import RunConfig
from pipeline.models import config_json, registry

log = logging.getLogger("pipeline")


def import_model(config: RunConfig, source: Path, *, file_bytes: int) -> None:
    """Write run_dir/checkpoints/step-00000000 with weights and without optimizer moments. Logs the `model=` overrides for pretrain.

    Args:
        config: configuration of the run; its model is ignored.
        source: the Hugging Face folder.
        file_bytes: maximum size of a checkpoint file, bytes.

    Raises:
        UserError: the model has an unsupported feature, its weights do not match its class, or run_dir contains another run.
    """
    content = huggingface_import.read_config(source)
    family, mapping = registry.find_mapping(content)
    model, training, files, _ = collect_errors(
        lambda: config_json.read(mapping, family.config, content),
        lambda: mapping.training_settings(content),
        lambda: huggingface_import.weight_files(source),
        lambda: huggingface_import.read_generation_config(source),
    )
    run_dir = Path(config.run_dir)
    settings = {"stage.input": {file.name: digest(file) for file in (source / "config.json", *files)}}
    complete = artifact.find_complete(run_dir / FOLDER, key="run_dir", stage="convert", settings=settings)
    if complete:
        log.info("convert: %s is already imported, nothing to do; %s", source, _continue_with(run_dir, complete.totals["model"]))
        return
    weights = ImportedWeights(StockWeights(source, mapping), model)
    _, unused = collect_errors(lambda: _check_run(run_dir), weights.check)
    adjusted, model = model, weights.config
    for field in dataclasses.fields(model):
        if getattr(model, field.name) != getattr(adjusted, field.name):
            log.info("convert: model.%s=%s, according to the weights", field.name, getattr(model, field.name))
    ignored = config_json.unread(mapping, content)
    if ignored:
        log.info("convert: %s does not read %s; an export keeps them", mapping.architecture, ", ".join(sorted(ignored)))
    if unused:
        log.warning("convert: the model does not use %s; skipped", ", ".join(unused))
    dropout_keys = sorted(key for key in content if config_json.is_dropout(key) and content[key])
    if dropout_keys:
        log.warning(
            "convert: %s is ignored: dropout is not supported in training", ", ".join(f"{key}={content[key]}" for key in dropout_keys)
        )

    overrides = " ".join([*model_option.overrides(model), *(f"training.{name}={value:g}" for name, value in training.items())])
    config = knobs.changed(config, {"model": model, **{f"training.{name}": value for name, value in training.items()}})
    saved_config = dataclasses.asdict(config)
    index = native.Index(native.TrainState(), saved_config)
    path = save.save_full(run_dir, index, weights.fragments(), file_bytes)
    copy_originals(run_dir / FOLDER, source, settings, {"model": overrides})
    log.info("convert: wrote %s (%s); %s", path, mapping.architecture, _continue_with(run_dir, overrides))


def _continue_with(run_dir: Path, overrides: str) -> str:
    """The settings of the stages that follow, for the log. Those of the tokenizer are the defaults in this run directory."""
    settings = [f"run_dir={run_dir}", *run_tokenizer.overrides(run_dir / FOLDER)]
    if "model.labels=" in overrides:
        return " ".join(["continue with stage=finetune training.objective=classification", *settings])
    return " ".join(["continue with stage=pretrain", *settings, overrides])


def _check_run(run_dir: Path) -> None:
    """Refuse a run_dir with checkpoints, except a checkpoint of step 0, which an interrupted import may have written."""
    trained = [path for path in native.complete(run_dir) if path != native.folder_of(run_dir, 0)]
    if trained:
        raise UserError.of("run_dir", run_dir, f"already contains a run: {trained[-1].name}", "choose another run_dir")
