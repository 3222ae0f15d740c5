"""The exponential moving average of the weights (training.ema), sharded and saved beside the master weights and the optimizer's state.

Only what the optimizer updates is averaged. Frozen weights do not change, and the biases of routers, which the load of the experts
controls, are used as they are, as `torch.optim.swa_utils.AveragedModel` does with buffers. Of LoRA the factors are averaged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.native import EMA
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config.training import TrainingConfig

log = logging.getLogger("pipeline")


class WeightAverage:
    """The average of fp32 master weights: `average = ema * average + (1 - ema) * weight` after every optimizer update.

    (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.2.3: an early estimate of the model after the decay of the rate.)

    Args:
        training: with training.ema; None averages nothing.
        masters: the fp32 master weights of this rank, which the optimizer updates in place.
    """

    def __init__(self, training: TrainingConfig, masters: Iterable[Tensor]) -> None:
        self._step = 0.0 if training.ema is None else 1.0 - training.ema
        self._masters = [] if training.ema is None else [master.detach() for master in masters]
        self._averages = [master.clone() for master in self._masters]

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Average the weights of a step, without waiting for the device.

        Args:
            skipped: 1.0 if the step changed nothing, and does not count, else 0.0; 0-dim, on the device of the weights.
        """
        step = self._step * (1 - skipped)
        for average, master in zip(self._averages, self._masters, strict=True):
            average.lerp_(master, step)

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return the entry of Fragment.tensors of a master weight by its index, flat; empty without training.ema."""
        return {EMA: self._averages[index].view(-1)} if self._averages else {}


@torch.no_grad()
def begin_where_missing(fragments: Sequence[Fragment], checkpoint: Checkpoint | MergedWeights) -> None:
    """Begin the average of the loaded weights that have none in the checkpoint: at the weights."""
    averaged = [fragment for fragment in fragments if EMA in fragment.tensors]
    new = [fragment for fragment in averaged if not checkpoint.has(fragment.piece.name, EMA)]
    begin(new)
    if new:
        count = f"for {len(new)} of {len(averaged)} weights of this rank" if len(new) < len(averaged) else "of weights"
        log.info("training.ema: %s has no average %s; it begins at the weights", checkpoint.path, count)


@torch.no_grad()
def begin(fragments: Iterable[Fragment]) -> None:
    """Begin the average at the weights."""
    for fragment in fragments:
        average, weight = fragment.tensors.get(EMA), fragment.tensors["weight"]
        if isinstance(average, Tensor) and isinstance(weight, Tensor):
            average.copy_(weight)
