"""Memory of the model state of a rank under each ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

FP32 = 4


class Sharded(Protocol):
    """Weights that ZeRO shards together: a bucket of training/buckets.py, or of the planner's trace."""

    @property
    def elements(self) -> int:
        """Number of elements, with the padding."""

    @property
    def ranks(self) -> int:
        """Number of ranks that shard them."""

    @property
    def decays(self) -> bool:
        """Whether they are matrices, which ZeRO 3 frees after use."""


@dataclass(frozen=True)
class StateFormat:
    """How a rank keeps its weights.

    Attributes:
        zero_stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also weights other than vectors.
        weight_bytes: of a weight in matrix products.
        state_tensors: fp32 tensors that the optimizer keeps for each weight.
    """

    zero_stage: int
    weight_bytes: int = 2
    state_tensors: int = 2


@dataclass(frozen=True)
class ModelState:
    """Bytes of a rank at the end of the backward pass, without activations and communication buffers."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Total bytes."""
        return self.weights + self.gradients + self.optimizer


def model_state(buckets: Iterable[Sharded], kept: StateFormat, *, gradient_bytes: int = FP32) -> ModelState:
    """The ZeRO arithmetic (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 3), as training/ does it.

    Not counted: gradients of the buckets that are being reduced (at most four), under ZeRO 3 the gathered weights of two or three blocks.

    Args:
        buckets: the rank's weights.
        kept: how it keeps them.
        gradient_bytes: of an accumulated gradient.
    """
    buckets, zero = list(buckets), kept.zero_stage
    whole, share = sum(bucket.elements for bucket in buckets), sum(bucket.elements / bucket.ranks for bucket in buckets)
    # Under ZeRO 3, matrices are rounded from the master weights when they are gathered.
    vectors = sum(bucket.elements for bucket in buckets if not bucket.decays or bucket.ranks == 1)
    # Without ZeRO, fp32 weights are their own master copy; DeepSpeed always keeps a separate one.
    master = 0 if zero == 0 and kept.weight_bytes == FP32 else FP32
    return ModelState(
        weights=(vectors if zero == 3 else whole) * kept.weight_bytes,
        gradients=(share if zero >= 2 else whole) * gradient_bytes,
        optimizer=(share if zero else whole) * (master + kept.state_tensors * FP32),
    )
