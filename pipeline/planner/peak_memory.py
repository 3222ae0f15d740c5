"""Memory of a rank at its peak: model state under ZeRO, activations in flight, and what is allocated besides."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.planner.engine_model import EngineModel
from pipeline.planner.operations import TracedPart
from pipeline.planner.planned_buckets import PlannedBucket
from pipeline.planner.state_memory import FP32, StateFormat

#: Share of the activations that the caching allocator loses to fragmentation.
FRAGMENTATION = 0.04


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of a rank at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    overhead: float
    frozen: float = 0.0
    """Weights that are not trained, which ZeRO does not shard."""

    @property
    def total(self) -> float:
        """Sum of all kinds of memory."""
        return self.frozen + self.weights + self.gradients + self.optimizer + self.activations + self.transient + self.overhead


def peak_memory(
    buckets: list[PlannedBucket],
    stages: list[list[TracedPart]],
    in_flight: float,
    state_format: StateFormat,
    engine: EngineModel,
    frozen: float = 0.0,
) -> PeakMemory:
    """Return the memory of a rank in the backward pass of the first micro-batch with all others in flight.

    Args:
        buckets: of the rank.
        stages: the parts of each of its stages.
        in_flight: bytes of the activations in flight.
        state_format: how it stores its weights.
        engine: what the engine does.
        frozen: bytes of its weights that are not trained.
    """
    state = engine.model_state(buckets, state_format)
    largest = max((bucket.elements for bucket in buckets), default=0)
    transient = max(beyond_saved(parts, engine)[0] for parts in stages)
    if state_format.zero_stage == 3:  # weights of two blocks, and the flat gradients of blocks
        transient += 2 * largest * state_format.weight_bytes + engine.reduction_buffers * largest * engine.gradient_bytes
    elif state_format.zero_stage == 2:
        transient += 3 * largest * FP32
    return PeakMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=in_flight,
        transient=transient,
        overhead=engine.context_bytes + FRAGMENTATION * (in_flight + transient),
        frozen=frozen,
    )


def beyond_saved(parts: list[TracedPart], engine: EngineModel) -> tuple[float, int]:
    """Return the most bytes that a stage allocates besides what its parts save, and the index of the part in whose backward pass that is.

    In the backward pass of a part, what the parts behind it saved is free again.
    """
    peaks, freed = [], 0.0
    for index in reversed(range(len(parts))):
        peaks.append((engine.transient_bytes(parts[index]) - freed, index))
        freed += engine.saved_bytes(parts[index])
    return max(peaks)


def largest_activations(stages: list[list[TracedPart]], in_flight: float) -> list[tuple[str, float]]:
    """Return what produces the activations in flight, with the bytes of each, largest first.

    Args:
        stages: the parts of each stage of a rank.
        in_flight: bytes of its activations in flight.
    """
    producers: dict[str, float] = {}
    for part in (part for parts in stages for part in parts):
        where = part.name if part.name in ("embed", "head") else "blocks"
        for producer, size in part.producers.items():
            name = f"{where}: {re.sub(r'^blocks[.][0-9]+[.]|[.]weight$', '', producer)}"
            producers[name] = producers.get(name, 0.0) + size
    saved = sum(producers.values())
    return sorted(((name, in_flight * size / saved) for name, size in producers.items()), key=lambda item: -item[1])
