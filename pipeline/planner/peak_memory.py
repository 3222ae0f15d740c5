"""Memory of a rank at its peak: model state under ZeRO, activations in flight, and what is allocated besides."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.planner.engine_model import EngineModel
from pipeline.planner.operations import TracedPart
from pipeline.planner.planned_buckets import PlannedBucket
from pipeline.planner.state_memory import StateFormat

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
    host: float = 0.0
    """In host memory besides (parallel.offload, activation_checkpointing=offload); not in `total`."""
    update: float = 0.0
    """Gradients and temporary tensors in the update of Muon: there are no activations then, and ZeRO has freed whole gradients. Counted
    instead of gradients, activations and transient tensors if it is more."""
    outside: float = 0.0
    """What CUDA and communicators take beside PyTorch's allocator; part of `overhead`."""

    @property
    def passes(self) -> float:
        """What is allocated in the passes, besides weights and optimizer."""
        return self.gradients + self.activations + self.transient

    @property
    def total(self) -> float:
        """Sum of all kinds of memory of the device."""
        return self.frozen + self.weights + self.optimizer + max(self.passes, self.update) + self.overhead


@dataclass(frozen=True)
class FullestMoment:
    """When most is allocated.

    Attributes:
        bytes: besides what the parts of the stage save.
        part: name of the part that computes.
        backward: whether that is its backward pass.
    """

    bytes: float
    part: str
    backward: bool


def peak_memory(
    buckets: list[PlannedBucket],
    stages: dict[int, list[TracedPart]],
    in_flight: float,
    state_format: StateFormat,
    engine: EngineModel,
    frozen: float = 0.0,
    *,
    outside: float,
    host: float = 0.0,
    compiled: bool = False,
    update: float = 0.0,
) -> PeakMemory:
    """Return the memory of a rank in the passes of a micro-batch with all others in flight, or in the update of the weights.

    Args:
        stages: index -> the parts of each of its stages.
        in_flight: bytes of the activations in flight.
        frozen: bytes of its weights that are not trained, as it keeps them.
        outside: bytes beside PyTorch's allocator.
        host: bytes of the activations in host memory.
        update: bytes of the temporary tensors of Muon.
    """
    trained = [bucket for bucket in buckets if bucket.trained]
    state = engine.model_state(trained, state_format)
    reduced = engine.gradient_bytes * sum(bucket.elements / (bucket.ranks if state_format.zero_stage else 1) for bucket in trained)
    transient = fullest_moment(buckets, stages, state_format, engine, compiled=compiled).bytes
    return PeakMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=in_flight,
        transient=transient,
        outside=outside,
        overhead=outside + FRAGMENTATION * max(in_flight + transient, update),
        frozen=frozen,
        host=state.host + host,
        update=reduced + update if update else 0.0,
    )


def fullest_moment(
    buckets: list[PlannedBucket], stages: dict[int, list[TracedPart]], state_format: StateFormat, engine: EngineModel, *, compiled: bool
) -> FullestMoment:
    """Return when a rank allocates the most besides what its parts save; arguments as of peak_memory."""
    moments = []
    for stage, parts in stages.items():
        beside = beside_passes(parts, stage, buckets, state_format, engine, compiled=compiled)
        moments.append(beyond_saved(parts, engine, beside))
    return max(moments, key=lambda moment: moment.bytes)


def beyond_saved(parts: list[TracedPart], engine: EngineModel, beside: list[tuple[float, float]] | None = None) -> FullestMoment:
    """Return when a stage allocates the most besides what its parts save.

    While a part computes, the parts behind it have saved nothing yet, or it is free again.

    Args:
        beside: of beside_passes; nothing when None.
    """
    moments, unsaved = [], 0.0
    for index in reversed(range(len(parts))):
        extra = (0.0, 0.0) if beside is None else beside[index]
        for backward, size in enumerate(engine.transient_bytes(parts[index])):
            moments.append(FullestMoment(size + extra[backward] - unsaved, parts[index].name, backward=bool(backward)))
        unsaved += engine.saved_bytes(parts[index])
    return max(moments, key=lambda moment: moment.bytes)


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


def beside_passes(
    parts: list[TracedPart], stage: int, buckets: list[PlannedBucket], state_format: StateFormat, engine: EngineModel, *, compiled: bool
) -> list[tuple[float, float]]:
    """Return the bytes that are allocated beside the forward and the backward pass of each part of a stage.

    The passes are those of a micro-batch after the first one, if there are several: the last reductions of the one before are in flight.

    Args:
        compiled: whether the blocks are compiled: their vectors are complete before their matrices.
    """
    if not state_format.shards_gradients:
        return [(0.0, 0.0)] * len(parts)
    held = [[bucket for bucket in buckets if bucket.decays and f"{stage} {index}" in bucket.parts] for index in range(len(parts))]
    gathered = [_gathered(buckets_of_part, state_format) for buckets_of_part in held]
    is_table = [part.name == "embed" for part in parts]  # its backward pass reads no weights
    before = _reductions(held, engine, compiled=compiled) if state_format.accumulates else []
    reduced = [0.0] * engine.pending + before
    beside = [(0.0, 0.0)] * len(parts)
    complete = reduced[len(reduced) - engine.pending :]
    pending = sum(complete)
    for index in reversed(range(len(parts))):
        following, preceding = gathered[index + 1 : index + 2], [] if index == 0 or is_table[index - 1] else gathered[index - 1 : index]
        filled = sum(_gradients(held[index], engine))
        beside[index] = (
            gathered[index] + sum(following) + pending,
            (0.0 if is_table[index] else gathered[index] + sum(preceding))
            + (0.0 if engine.fused_loss and parts[index].name == "head" else filled)
            + sum(complete[len(complete) - engine.pending :]),
        )
        complete += _sent(held[index], engine)
    return beside


def _reductions(held: list[list[PlannedBucket]], engine: EngineModel, *, compiled: bool) -> list[float]:
    """Bytes of the whole gradients of a stage in the order of their reductions; those of all vectors are negligible."""
    sizes = [size for buckets_of_part in reversed(held[1:]) for size in _sent(buckets_of_part, engine)]
    return [*sizes, *([] if compiled else [0.0]), *_sent(held[0], engine)]


def _gradients(buckets: list[PlannedBucket], engine: EngineModel) -> list[float]:
    """Bytes of the whole gradients of buckets, those of experts first: attention is before them."""
    ordered = sorted((bucket for bucket in buckets if bucket.trained), key=lambda bucket: bucket.axis)
    return [float(bucket.elements * engine.gradient_bytes) for bucket in ordered]


def _sent(buckets: list[PlannedBucket], engine: EngineModel) -> list[float]:
    """As _gradients, while they are reduced: with the copy that is sent in another dtype."""
    copied = engine.reduce_bytes if engine.reduce_bytes < engine.gradient_bytes else 0
    return [size * (1 + copied / engine.gradient_bytes) for size in _gradients(buckets, engine)]


def _gathered(buckets: list[PlannedBucket], state_format: StateFormat) -> float:
    """Bytes of the gathered weights of buckets."""
    gathers = state_format.zero_stage == 3
    return float(sum(bucket.elements for bucket in buckets if bucket.ranks > 1) * state_format.weight_bytes) if gathers else 0.0
