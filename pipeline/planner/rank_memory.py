"""Memory of a rank at its peak: model state under ZeRO, activations in flight, and what is allocated besides."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pipeline.planner.exchange import Bucket
from pipeline.planner.memory import FP32, StateFormat, model_state
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


def rank_memory(held: list[Bucket], stages: list[list[Part]], flight: float, kept: StateFormat, practice: Practice) -> Memory:
    """Return the memory of a rank in the backward pass of the first micro-batch with all others in flight.

    Args:
        held: its buckets.
        stages: the parts of each of its stages.
        flight: bytes of the activations in flight.
        kept: how it keeps its weights.
        practice: what the engine does.
    """
    zero = kept.zero_stage
    sharded = [replace(bucket, ranks=_shards(bucket, practice)) for bucket in held]
    scaled = replace(kept, state_tensors=kept.state_tensors + practice.scaled)
    state = model_state(sharded, scaled, gradient_bytes=practice.gradient_bytes)
    largest = max((bucket.elements for bucket in held), default=0)
    transient = max(beyond_saved(parts, practice)[0] for parts in stages)
    if zero == 3:  # weights of two blocks, and the flat gradients of a block and, in this engine, of two reductions
        reductions = 1 if practice.logits_bytes else 3
        transient += 2 * largest * kept.weight_bytes + reductions * largest * practice.gradient_bytes
    elif zero == 2:
        transient += 3 * largest * FP32
    return Memory(
        weights=state.weights,
        gradients=state.gradients + practice.gradient_copy * sum(bucket.elements for bucket in held),
        optimizer=state.optimizer,
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


def beyond_saved(parts: list[Part], practice: Practice) -> tuple[float, int]:
    """Return the most bytes that a stage allocates besides what its parts save, and the index of the part in whose backward pass that is.

    In the backward pass of a part, what the parts behind it saved is free again.
    """
    found, freed = [], 0.0
    for index in reversed(range(len(parts))):
        found.append((_transient(parts[index], practice) - freed, index))
        freed += saved_bytes(parts[index], practice)
    return max(found)


def largest_activations(stages: list[list[Part]], flight: float) -> list[tuple[str, float]]:
    """Return what produces the activations in flight, with the bytes of each, largest first.

    Args:
        stages: the parts of each stage of a rank.
        flight: bytes of its activations in flight.
    """
    producers: dict[str, float] = {}
    for part in (part for parts in stages for part in parts):
        where = part.name if part.name in ("embed", "head") else "blocks"
        for producer, size in part.producers.items():
            name = f"{where}: {re.sub(r'^blocks[.][0-9]+[.]|[.]weight$', '', producer)}"
            producers[name] = producers.get(name, 0.0) + size
    saved = sum(producers.values())
    return sorted(((name, flight * size / saved) for name, size in producers.items()), key=lambda item: -item[1])


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
