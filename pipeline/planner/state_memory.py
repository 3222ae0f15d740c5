"""Memory of weights, gradients and optimizer state of a rank under each ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.checkpoint.native import EMA
from pipeline.config.layout import Layout
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.parallel.parallelize import DTYPES
from pipeline.planner.planned_buckets import PlannedBucket

FP32 = 4


@dataclass(frozen=True)
class StateFormat:
    """How a rank stores its weights.

    Attributes:
        zero_stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also weights other than vectors.
        weight_bytes: of a weight in matrix products.
        state_bytes: of what is kept for each weight beside the fp32 master weight: by the optimizer, and the average of training.ema.
        matrix_bytes: the same for a weight that Muon updates.
        offload: whether master weights and these tensors are in host memory.
        reduce_bytes: of a gradient that is sent to be summed over the ranks that shard it.
        separate: whether the forward pass reads other values than those of the master weights (OptimizerKind.separate).
        newton_schulz_steps: iterations of Muon.
        accumulates: whether gradients of several micro-batches are added.
    """

    zero_stage: int
    weight_bytes: int = 2
    state_bytes: int = 2 * FP32
    offload: bool = False
    reduce_bytes: int = FP32
    matrix_bytes: int = 2 * FP32
    separate: bool = False
    newton_schulz_steps: int = 5
    accumulates: bool = True

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank holds its part of a gradient once its bucket is complete. ZeRO 1 adds whole ones, unless there is one to add."""
        return self.zero_stage >= 2 or (self.zero_stage == 1 and not self.accumulates)


@dataclass(frozen=True)
class ModelState:
    """Bytes of a rank at the end of the backward pass, without activations and communication buffers.

    Attributes:
        weights, gradients, optimizer: on the device.
        host: in host memory besides (parallel.offload), with the pinned buffers of the copies.
    """

    weights: float
    gradients: float
    optimizer: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Total bytes of the device."""
        return self.weights + self.gradients + self.optimizer


def model_state(buckets: Iterable[PlannedBucket], state_format: StateFormat, *, gradient_bytes: int = FP32) -> ModelState:
    """Return the bytes of a rank under ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 3), as training/ does it.

    Not counted: gradients of the buckets that are being reduced (at most four), under ZeRO 3 the gathered weights of two or three blocks.

    Args:
        gradient_bytes: of an accumulated gradient.
    """
    buckets, zero = list(buckets), state_format.zero_stage
    whole, share = sum(bucket.elements for bucket in buckets), sum(bucket.elements / bucket.ranks for bucket in buckets)
    # Under ZeRO 3, matrices are rounded from the master weights when they are gathered.
    vectors = sum(bucket.elements for bucket in buckets if not bucket.decays or bucket.ranks == 1)
    # fp32 weights that are not divided are their own master weights.
    shares = state_format.weight_bytes == FP32 and not state_format.separate and not state_format.offload
    weights: float = vectors if zero == 3 else whole
    if zero == 3 and (state_format.offload or state_format.separate):  # the rounded partitions of the matrices, which are gathered
        weights += sum(bucket.elements / bucket.ranks for bucket in buckets if bucket.decays and bucket.ranks > 1)
    gradients = share if state_format.shards_gradients else whole
    optimizer = 0.0
    for bucket in buckets:
        ranks = bucket.ranks if zero else 1
        kept = state_format.matrix_bytes if bucket.muon else state_format.state_bytes
        optimizer += bucket.elements / ranks * (kept + (0 if shares and ranks == 1 else FP32))
    if not state_format.offload:
        return ModelState(weights * state_format.weight_bytes, gradients * gradient_bytes, optimizer)
    buffers = share * (FP32 + state_format.weight_bytes)
    return ModelState(weights * state_format.weight_bytes, gradients * gradient_bytes, 0.0, host=optimizer + buffers)


def state_tensors(config: RunConfig, *, muon: bool = False) -> tuple[str, ...]:
    """Return the tensors that a trained weight has beside its master weight: the optimizer's, and its fp32 average.

    Args:
        muon: of a weight that Muon updates.
    """
    return (*OPTIMIZERS[config.optimizer.name].state_of(muon=muon), *(() if config.training.ema is None else (EMA,)))


def state_format_of(config: RunConfig, layout: Layout | None = None) -> StateFormat:
    """Return how the ranks of a job store their weights; with several micro-batches, if the layout is not given."""
    weight_bytes = DTYPES[config.precision.dtype].itemsize
    offload, reduce_bytes = config.parallel.offload == "optimizer", DTYPES[config.precision.reduce_dtype].itemsize
    moment = DTYPES[config.optimizer.state_dtype].itemsize
    kept = [sum(FP32 if name == EMA else moment for name in state_tensors(config, muon=muon)) for muon in (False, True)]
    separate = OPTIMIZERS[config.optimizer.name].separate
    steps = config.optimizer.muon_steps
    accumulates = layout is None or layout.micro_batches > 1 or layout.pipeline > 1
    return StateFormat(config.parallel.zero_stage, weight_bytes, kept[0], offload, reduce_bytes, kept[1], separate, steps, accumulates)
