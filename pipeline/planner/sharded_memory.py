"""What ZeRO 2 and 3 allocate beside the passes of each part: gathered weights, and whole gradients until they are reduced."""

from __future__ import annotations

from pipeline.planner.engine_model import EngineModel
from pipeline.planner.operations import TracedPart
from pipeline.planner.planned_buckets import PlannedBucket
from pipeline.planner.state_memory import StateFormat


def beside_passes(
    parts: list[TracedPart], stage: int, buckets: list[PlannedBucket], state_format: StateFormat, engine: EngineModel, *, compiled: bool
) -> list[tuple[float, float]]:
    """Return the bytes that are allocated beside the forward and the backward pass of each part of a stage.

    The passes are those of a micro-batch after the first one, while the last reductions of the micro-batch before it are in flight.

    Args:
        parts: of the stage.
        stage: its index.
        buckets: of the rank.
        state_format: how it stores its weights.
        engine: what the engine does.
        compiled: whether the blocks are compiled: their vectors are complete before their matrices.
    """
    if state_format.zero_stage < 2:
        return [(0.0, 0.0)] * len(parts)
    held = [[bucket for bucket in buckets if bucket.decays and f"{stage} {index}" in bucket.parts] for index in range(len(parts))]
    gathered = [_gathered(own, state_format) for own in held]
    is_table = [part.name == "embed" for part in parts]  # its backward pass reads no weights
    reduced = [0.0] * engine.pending + _reductions(held, engine, compiled=compiled)
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
    sizes = [size for own in reversed(held[1:]) for size in _sent(own, engine)]
    return [*sizes, *([] if compiled else [0.0]), *_sent(held[0], engine)]


def _gradients(own: list[PlannedBucket], engine: EngineModel) -> list[float]:
    """Bytes of the whole gradients of buckets, those of experts first: attention is before them."""
    ordered = sorted((bucket for bucket in own if bucket.trained), key=lambda bucket: bucket.axis)
    return [float(bucket.elements * engine.gradient_bytes) for bucket in ordered]


def _sent(own: list[PlannedBucket], engine: EngineModel) -> list[float]:
    """As _gradients, while they are reduced: with the copy that is sent in another dtype."""
    copied = engine.reduce_bytes if engine.reduce_bytes < engine.gradient_bytes else 0
    return [size * (1 + copied / engine.gradient_bytes) for size in _gradients(own, engine)]


def _gathered(own: list[PlannedBucket], state_format: StateFormat) -> float:
    """Bytes of the gathered weights of buckets."""
    gathers = state_format.zero_stage == 3
    return float(sum(bucket.elements for bucket in own if bucket.ranks > 1) * state_format.weight_bytes) if gathers else 0.0
