"""Memory of the model state of a rank under each ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class ModelState:
    """Bytes per rank at the end of the backward pass, without activations and communication buffers."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.weights + self.gradients + self.optimizer


def model_state(parameters: int, *, dtype: torch.dtype, zero_stage: int, data: int, state_tensors: int) -> ModelState:
    """The ZeRO arithmetic (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 3), as training/ does it.

    Gradients are accumulated in fp32 over the micro-batches of a step and reduced after the last one. Until then they are not sharded,
    also under ZeRO 2 and 3.

    Args:
        parameters: number of the rank's parameters, before ZeRO.
        dtype: number format of the weights.
        zero_stage: 0 shards nothing, 1 and 2 the optimizer state, 3 also the weights.
        data: number of ranks to shard over.
        state_tensors: fp32 tensors that the optimizer keeps for each weight.
    """
    share = -(-parameters // data)
    # Without ZeRO, fp32 weights are their own master copy; DeepSpeed always keeps a separate one.
    master = 0 if zero_stage == 0 and dtype == torch.float32 else FP32
    return ModelState(
        weights=(share if zero_stage == 3 else parameters) * dtype.itemsize,
        gradients=parameters * FP32,
        optimizer=(parameters if zero_stage == 0 else share) * (master + state_tensors * FP32),
    )
