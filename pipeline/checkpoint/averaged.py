"""The averaged weights of a checkpoint (training.ema), in the place of its weights: stage.weights=ema."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pipeline.checkpoint.native import EMA
from pipeline.checkpoint.reader import Checkpoint, Run
from pipeline.common.errors import UserError


class AveragedCheckpoint(Checkpoint):
    """A checkpoint that is read with its averaged weights; a weight that has no average, such as a frozen one, is read as it is.

    Args:
        checkpoint: the checkpoint.

    Raises:
        UserError: it has no averaged weights.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path, checkpoint.contents)
        if not any(self.has(name, EMA) for name in self.names()):
            rule = f"requires averaged weights, and {self.path} has none: its run had no training.ema"
            raise UserError.of("stage.weights", EMA, rule, "set stage.weights=trained, or train with training.ema=0.999")

    def read(self, runs: Iterable[Run]) -> None:
        """See Checkpoint."""
        mapped: list[Run] = []
        for run in runs:
            averaged = self.has(run.name, EMA)
            if averaged and "weight" in run.tensors:
                mapped.append(replace(run, tensors={EMA: run.tensors["weight"]}))
            mapped.append(replace(run, tensors={kind: values for kind, values in run.tensors.items() if kind != "weight" or not averaged}))
        super().read(mapped)


def chosen(checkpoint: Checkpoint, weights: str) -> Checkpoint:
    """Return a checkpoint with the weights that stage.weights names; raises as AveragedCheckpoint."""
    return AveragedCheckpoint(checkpoint) if weights == EMA else checkpoint


def settings_of(weights: str) -> dict[str, str]:
    """Return what records and manifests of a stage say of stage.weights; nothing for the default, as before there was a choice."""
    return {"stage.weights": weights} if weights == EMA else {}
