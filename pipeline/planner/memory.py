"""Memory of the model state of a rank under each ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pipeline.training.buckets import Bucket

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


def model_state(buckets: Iterable[Bucket], *, dtype: torch.dtype, zero_stage: int, state_tensors: int) -> ModelState:
    """The ZeRO arithmetic (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 3), as training/ does it.

    Not counted: gradients of the buckets that are being reduced (at most four), under ZeRO 3 the gathered weights of two or three blocks.

    Args:
        buckets: the rank's weights.
        dtype: number format of the weights.
        zero_stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also weights other than vectors.
        state_tensors: fp32 tensors that the optimizer keeps for each weight.
    """
    buckets = list(buckets)
    whole, share = sum(bucket.elements for bucket in buckets), sum(bucket.partition_elements for bucket in buckets)
    # Under ZeRO 3, matrices are rounded from the master weights when they are gathered.
    kept_weights = sum(bucket.elements for bucket in buckets if not bucket.decays or bucket.group.size() == 1)
    # Without ZeRO, fp32 weights are their own master copy; DeepSpeed always keeps a separate one.
    master = 0 if zero_stage == 0 and dtype == torch.float32 else FP32
    return ModelState(
        weights=(kept_weights if zero_stage == 3 else whole) * dtype.itemsize,
        gradients=(share if zero_stage >= 2 else whole) * FP32,
        optimizer=(share if zero_stage else whole) * (master + state_tensors * FP32),
    )
