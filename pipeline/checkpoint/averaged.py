"""The averaged weights of a checkpoint (training.ema), in the place of its weights: stage.weights=ema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.checkpoint.native import EMA
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import UserError


class AveragedCheckpoint(Checkpoint):
    """A checkpoint that is read with its averaged weights; one that has no average, such as a frozen one, is read as it is.

    Raises:
        UserError: it has no averaged weights.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not any(self.has(name, EMA) for name in self.names()):
            rule = f"requires averaged weights, and {path} has none: its run had no training.ema"
            raise UserError.of("stage.weights", EMA, rule, "set stage.weights=trained, or train with training.ema=0.999")

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """See Checkpoint."""
        return super().tensor(name, self._kind_of(name, kind))

    def fragment(self, rank: int, name: str, geometry: dict[str, Any], kind: str) -> Tensor | None:
        """See Checkpoint."""
        return super().fragment(rank, name, geometry, self._kind_of(name, kind))

    def _kind_of(self, name: str, kind: str) -> str:
        """The kind of the stored tensor that is read as `kind`."""
        return EMA if kind == "weight" and self.has(name, EMA) else kind


def open_checkpoint(path: Path, weights: str) -> Checkpoint:
    """Open a checkpoint with the weights that stage.weights names; raises as AveragedCheckpoint."""
    return AveragedCheckpoint(path) if weights == EMA else Checkpoint(path)


def settings_of(weights: str) -> dict[str, str]:
    """Return what records and manifests of a stage say of stage.weights; nothing for the default, as before there was a choice."""
    return {"stage.weights": weights} if weights == EMA else {}
