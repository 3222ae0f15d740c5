"""Bytes of model state on a rank: what ZeRO shards over the data ranks and what it leaves whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class ModelState:
    """Bytes that one rank holds besides activations and communication buffers, at the end of the backward pass."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def model_state(parameters: int, *, dtype: torch.dtype, zero_stage: int, data: int, state_tensors: int) -> ModelState:
    """The ZeRO arithmetic (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 3), as training/ does it.

    Gradients are summed in fp32 over the micro-batches of a step and reduced after the last one. Until then they are whole,
    also under ZeRO 2 and 3.

    Args:
        parameters: of the rank's part of the model, before ZeRO.
        dtype: number format of the weights.
        zero_stage: 0 shards nothing, 1 and 2 the optimizer's state, 3 the weights too.
        data: ranks to shard over.
        state_tensors: fp32 tensors that the optimizer keeps for each weight.
    """
    share = -(-parameters // data)
    # Without ZeRO an fp32 model is its own master copy; DeepSpeed keeps one in any case.
    master = 0 if zero_stage == 0 and dtype == torch.float32 else FP32
    return ModelState(
        weights=(share if zero_stage == 3 else parameters) * dtype.itemsize,
        gradients=parameters * FP32,
        optimizer=(parameters if zero_stage == 0 else share) * (master + state_tensors * FP32),
    )
