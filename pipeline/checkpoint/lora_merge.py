"""Weights of a checkpoint with LoRA adapters merged into them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.lora_adapter import Adapter, adapter_of, check_base
from pipeline.checkpoint.peft_format import read_peft
from pipeline.checkpoint.reader import Checkpoint, Run
from pipeline.config.lora import is_adapter
from pipeline.layers.lora import merged
from pipeline.models import config_classes


class MergedWeights:
    """The weights of a checkpoint with an adapter merged into them; for other uses it is the checkpoint.

    Args:
        checkpoint: the checkpoint; its own adapter, if it has one, is merged.
        adapter: another adapter to merge.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter | None = None) -> None:
        self.checkpoint, self.path, self.config, self.step = checkpoint, checkpoint.path, checkpoint.config, checkpoint.step
        self.train_state = checkpoint.train_state
        own = adapter_of(checkpoint)
        self._adapters = [source.layers for source in (own, adapter) if source is not None]
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
    def read(self, runs: Iterable[Run]) -> None:
        """As Checkpoint.read. A weight that an adapter changes is merged as a whole, one at a time."""
        unchanged: list[Run] = []
        for run in runs:
            if "weight" not in run.tensors or not self._is_changed(run.name):
                unchanged.append(run)
                continue
            unchanged.append(replace(run, tensors={kind: values for kind, values in run.tensors.items() if kind != "weight"}))
            values, full = run.tensors["weight"], self.tensor(run.name)
            values.copy_(full[tuple(slice(*side) for side in run.box)].flatten()[run.start : run.start + values.numel()])
        self.checkpoint.read(unchanged)

    def _is_changed(self, name: str) -> bool:
        """Whether an adapter changes a weight."""
        return name in self._saved or any(name.removesuffix(".weight") in layers for layers in self._adapters)


def open_merged(source: Path | Checkpoint, folder: str | None) -> MergedWeights:
    """Open a checkpoint with an adapter merged into its weights.

    Args:
        source: the checkpoint, or its folder.
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
