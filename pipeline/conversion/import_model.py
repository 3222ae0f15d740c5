"""Import by stage=convert: a folder of Hugging Face or of another tool -> native checkpoint, from which pretrain continues."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipeline.checkpoint import native, save
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common import artifact, knobs
from pipeline.common.errors import UserError, collect_errors
from pipeline.config import run_tokenizer
from pipeline.config.paths import CONF_DIR
from pipeline.config.schema import RunConfig
from pipeline.conversion import full_weights, import_comparison, import_formats
from pipeline.conversion.foreign_weights import ForeignWeights
from pipeline.conversion.imported import FOLDER, copy_originals
from pipeline.data.tokenize.tokenizer import load
from pipeline.models.config import ModelConfig
from pipeline.models.config_classes import CONFIG_CLASSES

log = logging.getLogger("pipeline")


def import_model(config: RunConfig, source: Path, *, file_bytes: int) -> None:
    """Write a checkpoint into run_dir, and log the `model=` overrides for pretrain.

    It is of step 0, without moments; that of a universal checkpoint of DeepSpeed is of its step, with moments.

    Args:
        config: configuration of the run; its model is used if the folder does not tell its own.
        source: a folder of one of import_formats.KNOWN.
        file_bytes: maximum size of a checkpoint file, bytes.

    Raises:
        UserError: the format is unknown, the model is not supported, its weights do not match it, or run_dir contains another run.
        CheckFailed: the imported model computes other logits than the source, or the checkpoint has other weights.
    """
    opened = import_formats.open_folder(source, config.model)
    log.info("convert: %s is a checkpoint of %s", source, opened.tool)
    model, training = opened.weights.config, opened.described.training if opened.described else {}
    run_dir = Path(config.run_dir)
    settings = {"stage.input": opened.identity}
    if (complete := _find_complete(run_dir, source, opened.identity)) is not None:
        log.info("convert: %s is already imported, nothing to do; %s", source, _continue_with(run_dir, complete.totals["model"]))
        return
    _, _, unused = collect_errors(
        lambda: _check_run(run_dir, opened.state.step),
        lambda: _check_entries(source, opened.tokenizer, model.vocab_size),
        opened.weights.check,
    )
    import_formats.report(opened, unused)
    compared = import_comparison.compare_logits(opened.weights, opened.load_stock)

    overrides = " ".join([*model_overrides(model), *(f"training.{name}={value:g}" for name, value in training.items())])
    config = knobs.changed(config, {"model": model, **{f"training.{name}": value for name, value in training.items()}})
    saved_config = dataclasses.asdict(config)
    index = native.Index(opened.state, saved_config)
    digests = import_comparison.Digests()
    path = save.save_full(run_dir, index, digests.of(full_weights.fragments(opened.weights, opened.moments)), file_bytes)
    digests.compare(Checkpoint(path), listed=not compared)
    if isinstance(opened.weights, ForeignWeights):
        opened.weights.warn()
    totals = {"model": overrides, "input": str(source.absolute())}
    copy_originals(run_dir / FOLDER, opened.home, opened.tokenizer, settings, totals)
    if step := opened.state.step:
        log.info("convert: the run continues at step %d: set training.steps, which counts from the beginning, to more than that", step)
    log.info("convert: wrote %s (%s); %s", path, opened.tool, _continue_with(run_dir, overrides))


def _check_entries(source: Path, tokenizer: Path, rows: int) -> None:
    """Refuse a tokenizer with entries for which the model has no embedding."""
    entries = max(load(tokenizer, "stage.input").get_vocab().values()) + 1 if (tokenizer / "tokenizer.json").is_file() else 0
    if entries > rows:
        rule = f"has a tokenizer of {entries} entries, and {rows} rows of the embedding"
        resize = f"model.resize_token_embeddings({entries}) of transformers and save_pretrained give every entry a row"
        raise UserError.of(
            "stage.input", source, rule, f"remove the tokens that the model does not have from {tokenizer}, or resize: {resize}"
        )


def _find_complete(run_dir: Path, source: Path, identity: dict[str, Any]) -> artifact.Manifest | None:
    """Return the manifest of a complete import of the same files, None without one.

    Raises:
        UserError: the import is of other files.
    """
    if not (run_dir / FOLDER / artifact.MANIFEST).is_file():
        return None
    manifest = artifact.read(run_dir / FOLDER, key="run_dir", stage="convert")
    before = manifest.settings.get("stage.input", {})
    if before == identity:
        return manifest
    origin = manifest.totals.get("input")
    if origin == str(source.absolute()):
        changed = ", ".join(sorted(name for name in before | identity if before.get(name) != identity.get(name)))
        rule = f"contains the import of {source} as it was before these files were written: {changed}"
    else:
        rule = f"already contains an imported model, that of {origin or 'other files'} ({manifest.totals['model']})"
    raise UserError.of("run_dir", run_dir, rule, "choose another run_dir, or remove this one")


def _continue_with(run_dir: Path, overrides: str) -> str:
    """The settings of the stages that follow, for the log. Those of the tokenizer are the defaults in this run directory."""
    settings = [run_tokenizer.override("run_dir", str(run_dir)), *run_tokenizer.overrides(run_dir / FOLDER)]
    if "model.labels=" in overrides:
        return " ".join(["continue with stage=finetune training.objective=classification", *settings])
    return " ".join(["continue with stage=pretrain", *settings, overrides])


def _check_run(run_dir: Path, step: int) -> None:
    """Refuse a run_dir with checkpoints, except that of the step of the import, which an interrupted one may have written."""
    trained = [path for path in native.complete(run_dir) if path != native.folder_of(run_dir, step)]
    if trained:
        raise UserError.of("run_dir", run_dir, f"already contains a run: {trained[-1].name}", "choose another run_dir")


def model_overrides(model: ModelConfig) -> list[str]:
    """Return `model=NAME` of the closest model in conf/model, and `model.KEY=VALUE` for every difference."""
    differences = {
        name: {key: value for key, value in vars(model).items() if getattr(shipped, key) != value}
        for name, shipped in _shipped()
        if type(shipped) is type(model)
    }
    name = min(differences, key=lambda name: (len(differences[name]), name))
    return [f"model={name}", *(f"model.{key}={_format(value)}" for key, value in differences[name].items())]


@functools.cache
def _shipped() -> list[tuple[str, ModelConfig]]:
    """(name, configuration) of the models of conf/model that are based on no other one."""
    models = []
    for file in sorted((CONF_DIR / "model").glob("*.yaml")):
        values: Any = OmegaConf.to_container(OmegaConf.load(file))
        base, *others = values.pop("defaults")
        family = re.fullmatch(r"/schema/model/(\w+)@_here_", base)
        if family and others == ["_self_"]:
            models.append((file.stem, CONFIG_CLASSES[family[1]](**values)))
    return models


def _format(value: Any) -> str:
    """Format a value in Hydra syntax."""
    return str(value) if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
