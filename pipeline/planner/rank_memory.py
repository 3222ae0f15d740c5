"""Memory of a rank at its peak: model state under ZeRO, activations in flight, and what is allocated besides."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.planner.exchange import FP32, Bucket
from pipeline.planner.operations import AttentionCall, Part
from pipeline.planner.practice import Practice

#: Share of the activations that the caching allocator loses to fragmentation.
FRAGMENTATION = 0.04


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    overhead: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient + self.overhead


@dataclass(frozen=True)
class ModelState:
    """What a rank keeps of the weights.

    Attributes:
        zero_stage: 0 to 3.
        weight_bytes: of a weight in matrix products.
        state_tensors: fp32 tensors of the optimizer for each weight.
    """

    zero_stage: int
    weight_bytes: int = 2
    state_tensors: int = 2


def rank_memory(held: list[Bucket], stages: list[list[Part]], flight: float, state: ModelState, practice: Practice) -> Memory:
    """Return the memory of a rank in the backward pass of the first micro-batch with all others in flight.

    Args:
        held: its buckets.
        stages: the parts of each of its stages.
        flight: bytes of the activations in flight.
        state: what it keeps of the weights.
        practice: what the engine does.
    """
    zero = state.zero_stage
    whole = sum(bucket.elements for bucket in held)
    share = sum(bucket.elements / _shards(bucket, practice) for bucket in held)
    kept = sum(bucket.elements for bucket in held if not bucket.decays or bucket.ranks == 1) if zero == 3 else whole
    master = 0 if zero == 0 and state.weight_bytes == FP32 else FP32
    largest = max((bucket.elements for bucket in held), default=0)
    transient = max(beyond_saved(parts, practice) for parts in stages)
    if zero == 3:  # weights of two blocks, and the flat gradients of a block and, in this engine, of two reductions
        reductions = 1 if practice.logits_bytes else 3
        transient += 2 * largest * state.weight_bytes + reductions * largest * practice.gradient_bytes
    elif zero == 2:
        transient += 3 * largest * FP32
    return Memory(
        weights=kept * state.weight_bytes,
        gradients=(share if zero >= 2 else whole) * practice.gradient_bytes + whole * practice.gradient_copy,
        optimizer=(share if zero else whole) * (master + FP32 * (state.state_tensors + practice.scaled)),
        activations=flight,
        transient=transient,
        overhead=practice.context_bytes + FRAGMENTATION * (flight + transient),
    )


def _shards(bucket: Bucket, practice: Practice) -> int:
    """Ranks over which a bucket is sharded."""
    return practice.shard_ranks if practice.shard_ranks and bucket.axis == "dense" else bucket.ranks


def saved_bytes(part: Part, practice: Practice) -> float:
    """Return the bytes that a part keeps for its backward pass; with unfused attention also scores, probabilities and a mask."""
    extra = 0.0
    recomputes = any(operation.phase == "recompute" for operation in part.operations if isinstance(operation, AttentionCall))
    if practice.scores == "saved" and not recomputes:
        extra = scores_bytes(part)
    if practice.logits_bytes and part.name == "head":  # without this project's fused loss, which saves the gradient of its weight
        return sum(2.0 * p.m * p.k for p in part.products if p.phase == "forward" and p.name)
    return part.saved + extra


def beyond_saved(parts: list[Part], practice: Practice) -> float:
    """Return the most bytes that a stage allocates besides what its parts save.

    In the backward pass of a part, what the parts behind it saved is free again.
    """
    most, freed = 0.0, 0.0
    for part in reversed(parts):
        most = max(most, _transient(part, practice) - freed)
        freed += saved_bytes(part, practice)
    return most


def _transient(part: Part, practice: Practice) -> float:
    """Bytes that a part allocates at most besides what it saves."""
    if practice.logits_bytes and part.name == "head":
        return logits_of(part) * practice.logits_bytes
    return part.peak + (0.0 if practice.scores == "fused" else scores_bytes(part))


def scores_bytes(part: Part) -> float:
    """Return the bytes of scores and probabilities (16 bits each) and a dropout mask (8 bits) of the attention of a part's forward pass."""
    calls = [operation for operation in part.operations if isinstance(operation, AttentionCall) and operation.phase == "forward"]
    return sum(5.0 * call.batch * call.heads * call.queries * call.keys for call in calls)


def logits_of(part: Part) -> float:
    """Return the number of logits of a micro-batch of a head."""
    return float(sum(p.m * p.n for p in part.products if p.phase == "forward" and p.name))
