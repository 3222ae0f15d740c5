"""Weights of a checkpoint with LoRA adapters merged into them, and the export of an adapter in PEFT's format (stage.format=peft)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint import peft_format
from pipeline.checkpoint.lora_adapter import Adapter, adapter_of, base_hash, check_base, lora_of
from pipeline.checkpoint.native import INDEX
from pipeline.checkpoint.peft_format import read_peft
from pipeline.checkpoint.reader import Checkpoint, WantedRun, settings_of_weights, with_weights
from pipeline.common import artifact
from pipeline.common.atomic_files import atomic_folder, digest
from pipeline.common.errors import UserError, collect_errors
from pipeline.config.lora import is_adapter
from pipeline.layers.lora import merged
from pipeline.models import config_classes, registry

log = logging.getLogger("pipeline")


class MergedWeights:
    """The weights of a checkpoint with an adapter merged into them; for other uses it is the checkpoint.

    Args:
        checkpoint: the checkpoint; its own adapter, if it has one, is merged.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter | None = None) -> None:
        self.checkpoint, self.path, self.config, self.step = checkpoint, checkpoint.path, checkpoint.config, checkpoint.step
        self.train_state = checkpoint.train_state
        stored = adapter_of(checkpoint)
        self._adapters = [source.layers for source in (stored, adapter) if source is not None]
        self._saved = {} if adapter is None else adapter.saved

    def names(self) -> list[str]:
        """Names of all weights, without those of adapters."""
        return [name for name in self.checkpoint.names() if not is_adapter(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""
        return self.checkpoint.shape(name)

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """Return a full weight, or one of its moments; errors as in Checkpoint.tensor."""
        if kind == "weight" and name in self._saved:
            return self._saved[name]
        value = self.checkpoint.tensor(name, kind)
        for layers in self._adapters if kind == "weight" else ():
            if (factors := layers.get(name.removesuffix(".weight"))) is not None:
                value = merged(value.float(), factors.a, factors.b, factors.scale)
        return value

    def has(self, name: str, kind: str) -> bool:
        """As Checkpoint.has."""
        return self.checkpoint.has(name, kind)

    @torch.no_grad()
    def read(self, runs: Iterable[WantedRun]) -> None:
        """As Checkpoint.read. A weight that an adapter changes is merged as a whole, one at a time."""
        unchanged: list[WantedRun] = []
        for run in runs:
            is_adapted = any(run.name.removesuffix(".weight") in layers for layers in self._adapters)
            if "weight" not in run.tensors or not (is_adapted or run.name in self._saved):
                unchanged.append(run)
                continue
            unchanged.append(replace(run, tensors={kind: values for kind, values in run.tensors.items() if kind != "weight"}))
            values, full = run.tensors["weight"], self.tensor(run.name)
            values.copy_(full[tuple(slice(*side) for side in run.box)].flatten()[run.start : run.start + values.numel()])
        self.checkpoint.read(unchanged)


def open_merged(source: Path | Checkpoint, folder: str | None) -> MergedWeights:
    """Open a checkpoint with an adapter merged into its weights.

    Args:
        folder: an adapter in PEFT's format (stage.adapter), None for none.

    Raises:
        UserError: the adapter is of another base, or cannot be read; or as Checkpoint.
    """
    checkpoint = Checkpoint(source) if isinstance(source, Path) else source
    if folder is None:
        return MergedWeights(checkpoint)
    model = config_classes.from_dict(checkpoint.config["model"])
    adapter = read_peft(Path(folder), model, "stage.adapter")
    check_base(adapter, MergedWeights(checkpoint), model, "stage.adapter")
    return MergedWeights(checkpoint, adapter)


def export_adapter(path: Path, output: Path, weights: str = "trained") -> None:
    """Write the adapter of a checkpoint.

    Raises:
        UserError: the checkpoint has no adapter, no transformers class implements the model, or the folder contains other files.
    """
    settings = {"stage.checkpoint": f"{path.name} {digest(path / INDEX)}", "stage.format": "peft", **settings_of_weights(weights)}
    if artifact.find_complete(output, key="stage.output", stage="convert", settings=settings):
        log.info("convert: %s is complete, nothing to do (from %s)", output, path)
        return
    checkpoint = with_weights(Checkpoint(path), weights)
    model = config_classes.from_dict(checkpoint.config["model"])
    if getattr(model, "labels", []):
        rule = "would leave out the head of the classifier, which is trained beside the adapter"
        raise UserError.of("stage.format", "peft", rule, "remove it: without it, the adapter is merged into full weights")
    trained, *_ = collect_errors(
        lambda: _adapter_of(checkpoint),
        lambda: artifact.check_empty(output, key="stage.output", stage="convert"),
        lambda: registry.mapping_of(model),
    )
    lora = lora_of(checkpoint.config)
    saved = {name: checkpoint.tensor(name).float() for name in checkpoint.names() if lora.saves(name)}
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
