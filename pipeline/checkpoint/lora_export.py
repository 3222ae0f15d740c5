"""Export of the adapter of a checkpoint in PEFT's format (stage=convert stage.format=peft)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from pipeline.checkpoint import peft_format
from pipeline.checkpoint.averaged import chosen, settings_of
from pipeline.checkpoint.lora_adapter import Adapter, adapter_of, base_hash, lora_of, saved_weights
from pipeline.checkpoint.native import INDEX
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common import artifact
from pipeline.common.atomic_files import atomic_folder, digest
from pipeline.common.errors import UserError, collect_errors
from pipeline.models import config_classes, registry

log = logging.getLogger("pipeline")


def export_adapter(path: Path, output: Path, weights: str = "trained") -> None:
    """Write the adapter of a checkpoint.

    Args:
        path: the checkpoint.
        output: folder to write.
        weights: stage.weights.

    Raises:
        UserError: the checkpoint has no adapter, no transformers class implements the model, or the folder contains other files.
    """
    settings = {"stage.checkpoint": f"{path.name} {digest(path / INDEX)}", "stage.format": "peft", **settings_of(weights)}
    if artifact.find_complete(output, key="stage.output", stage="convert", settings=settings):
        log.info("convert: %s is complete, nothing to do (from %s)", output, path)
        return
    checkpoint = chosen(Checkpoint(path), weights)
    model = config_classes.from_dict(checkpoint.config["model"])
    if getattr(model, "labels", []):
        rule = "would leave out the head of the classifier, which is trained beside the adapter"
        raise UserError.of("stage.format", "peft", rule, "remove it: without it, the adapter is merged into full weights")
    trained, *_ = collect_errors(
        lambda: _adapter_of(checkpoint),
        lambda: artifact.check_empty(output, key="stage.output", stage="convert"),
        lambda: registry.mapping_of(model),
    )
    saved, lora = saved_weights(checkpoint), lora_of(checkpoint.config)
    trained = replace(trained, saved=saved)
    if lora.quantize == "none":  # else the checkpoint has the rounded weights of its base
        trained = replace(trained, base=base_hash(checkpoint, model, saved))
    base = checkpoint.config["checkpoint"].get("initialize_from") or ""
    with atomic_folder(output) as folder:
        parameters = peft_format.write_peft(folder, trained, model, dropout=lora.dropout, base_name=base)
        totals = {"step": checkpoint.step, "parameters": parameters}
        artifact.write(folder, artifact.Manifest("convert", settings, artifact.entries(folder), totals))
    log.info("convert: wrote %s (step %d, an adapter with %s parameters)", output, checkpoint.step, f"{parameters:,}")


def _adapter_of(checkpoint: Checkpoint) -> Adapter:
    """Return the adapter of a checkpoint; refuse a checkpoint without one."""
    if (trained := adapter_of(checkpoint)) is None:
        rule = f"requires an adapter, and {checkpoint.path} has none"
        raise UserError.of("stage.format", "peft", rule, "choose a run with lora.rank above 0, or stage.format=huggingface")
    if of_experts := [layer for layer in trained.layers if layer in set(checkpoint.names())]:
        rule = f"is not supported for adapters of routed experts ({of_experts[0]})"
        raise UserError.of("stage.format", "peft", rule, "remove it: without it, the adapters are merged into full weights")
    return trained
