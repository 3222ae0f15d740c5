"""The gradient buckets of a rank from the traced weights, by the rule of training/buckets.py that the engine follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pipeline.config.layout import Layout
from pipeline.planner.operations import TracedWeights
from pipeline.planner.trace import Trace
from pipeline.training.buckets import bucket_name, padded_elements
from pipeline.training.matrix_layout import LocalMatrix


@dataclass
class PlannedBucket:
    """Weights whose gradients are reduced together.

    Attributes:
        axis: the ranks that hold them: dense, or data for experts.
        ranks: number of these ranks, or of those in a group of ZeRO.
        elements: with the padding.
        summed: elements whose gradients are first summed over the tensor ranks.
        shared: other axis over which the gradient is summed (tied_embedding, pipeline), or empty.
        decays: whether the weights are matrices, which ZeRO 3 frees after use.
        muon: whether Muon updates them.
        matrices: those that Muon updates.
        gathers: how often ZeRO 3 gathers them for a micro-batch.
        parts: those that hold them, each as stage and index in the stage.
        replicas: groups of ZeRO, with the same partitions.
        trained: whether they have gradients; frozen matrices are only gathered.
        head: whether they are those of the output head.
        stays: whether they are frozen matrices of the module whose backward pass is the last one, and stay gathered for the next forward
            pass.
    """

    axis: str
    ranks: int
    elements: int = 0
    summed: int = 0
    shared: str = ""
    decays: bool = True
    gathers: int = 0
    parts: set[str] = field(default_factory=set)
    replicas: int = 1
    trained: bool = True
    head: bool = False
    stays: bool = False
    muon: bool = False
    matrices: list[LocalMatrix] = field(default_factory=list)

    @property
    def shards_axis(self) -> str:
        """The ranks over which ZeRO shards them."""
        return self.axis if self.replicas == 1 else f"{self.axis}_shards"


def rank_weights(trace: Trace, layout: Layout, stages: list[int], *, uses: bool = False) -> Iterator[tuple[str, TracedWeights]]:
    """Yield the weights of some stages of one rank, each with the part of the stages that holds it.

    The copy of a tied embedding counts where the embedding is on another rank, or with `uses`; weights that all stages use count on all
    ranks.
    """
    first = 0 in stages
    if not first:
        yield from (("", weights) for weights in trace.parts["embed"].weights if weights.shared == "pipeline")
    for stage in stages:
        for index, part in enumerate(trace.stage_parts(layout, stage)):
            for weights in part.weights:
                if uses or not (weights.copy and first):
                    yield f"{stage} {index}", weights


def frozen_bytes(trace: Trace, layout: Layout, stages: list[int], zero_stage: int = 0) -> float:
    """Return the bytes of the weights of some stages of one rank that are not trained, without the padding of ZeRO 3."""
    ranks = {"dense": layout.zero_sizes(experts=False)[0], "data": layout.zero_sizes(experts=True)[0]}
    return sum(
        weights.stored / (ranks[weights.axis] if zero_stage == 3 and weights.sharded else 1)
        for _, weights in rank_weights(trace, layout, stages)
    )


def planned_buckets(trace: Trace, layout: Layout, stages: list[int], zero_stage: int = 0) -> list[PlannedBucket]:
    """Return the buckets of some stages of one rank: those of the trained weights, and with ZeRO 3 of frozen ones that it shards."""
    sizes = {"dense": layout.zero_sizes(experts=False), "data": layout.zero_sizes(experts=True)}
    buckets: dict[tuple[str, str, bool, float], PlannedBucket] = {}
    for part, weights in rank_weights(trace, layout, stages, uses=zero_stage == 3):
        if weights.fixed and not (zero_stage == 3 and weights.sharded):
            continue
        is_second_use = weights.copy and 0 in stages
        if is_second_use and not weights.fixed:
            continue
        shared = weights.shared if layout.pipeline > 1 else ""
        name = bucket_name(weights.name, weights.unit or part, matrix=weights.matrix, shared=bool(shared), muon=weights.muon)
        key = name, weights.axis, not weights.fixed, weights.rate
        if key not in buckets:
            ranks, replicas = sizes[weights.axis]
            other, trained = _other_ranks(shared, layout), not weights.fixed
            bucket = PlannedBucket(weights.axis, ranks, shared=other, decays=weights.matrix, replicas=replicas)
            buckets[key] = replace(bucket, trained=trained, head=weights.unit == "head", muon=weights.muon)
        bucket = buckets[key]
        bucket.parts.add(part)
        if is_second_use:  # a frozen tied matrix is gathered for the head, too
            continue
        bucket.elements += weights.elements
        if weights.muon:
            bucket.matrices.extend(weights.matrices)
        bucket.summed += weights.elements if weights.summed else 0
        # Ranks of different pipeline stages each use their own copy.
        bucket.gathers = max(bucket.gathers, 1 if shared == "tied_embedding" else weights.gathers)
    first = next((part for part, weights in rank_weights(trace, layout, stages) if not weights.fixed), "")
    for bucket in buckets.values():
        bucket.elements = padded_elements(bucket.elements, bucket.ranks)
        bucket.stays = not bucket.trained and first in bucket.parts and layout.pipeline == 1
    return list(buckets.values())


def _other_ranks(shared: str, layout: Layout) -> str:
    """The axis over which the gradient of a shared weight is summed; empty if one rank holds all its copies."""
    if shared == "tied_embedding" and layout.holder(0) == layout.holder(layout.stage_count - 1):
        return ""
    return shared
