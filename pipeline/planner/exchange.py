"""What the engine exchanges in a step besides the model's own collectives, as training/ and parallel/ do it: a list for every rank.

Gradients are reduced bucket by bucket (training/buckets.py), ZeRO gathers weights (training/weight_gathering.py), and activations are
sent between pipeline stages. tests/planner/test_real_run.py compares the list with the collectives of real runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.config.layout import Layout
from pipeline.planner.memory import FP32
from pipeline.planner.operations import Collective, Kind, Part, Phase, Weights
from pipeline.planner.trace import Trace


@dataclass(frozen=True)
class Exchange:
    """A collective that is repeated `count` times in a step; on the pipeline axis, a tensor that the rank sends."""

    collective: Collective
    count: int

    @property
    def bytes(self) -> float:
        """Of all repetitions."""
        return self.collective.bytes * self.count


@dataclass
class Bucket:
    """Weights whose gradients are reduced together.

    Attributes:
        axis: the ranks that hold them: dense, or data for experts.
        ranks: number of these ranks.
        elements: with the padding.
        summed: elements whose gradients are first summed over the tensor ranks.
        shared: other axis over which the gradient is summed (tied_embedding, pipeline), or empty.
        decays: whether the weights are matrices, which ZeRO 3 frees after use.
        gathers: how often ZeRO 3 gathers them for a micro-batch.
    """

    axis: str
    ranks: int
    elements: int = 0
    summed: int = 0
    shared: str = ""
    decays: bool = True
    gathers: int = 0

    def padded(self) -> Bucket:
        """With elements that divide into equal partitions of an even size."""
        alignment = 2 * self.ranks
        self.elements = math.ceil(self.elements / alignment) * alignment
        return self


def stage_parts(trace: Trace, layout: Layout, stage: int) -> list[Part]:
    """Return the parts of a pipeline stage."""
    parts = [trace.block(index) for index in layout.layers(stage, len(trace.kinds))]
    first, last = stage == 0, stage == layout.stage_count - 1
    return [*([trace.parts["embed"]] if first else []), *parts, *([trace.parts["head"]] if last else [])]


def rank_weights(trace: Trace, layout: Layout, stages: list[int]) -> Iterator[tuple[str, Weights]]:
    """Yield the weights of some stages of one rank, each with the name of its bucket.

    The copy of a tied embedding counts where the embedding is on another rank, and weights that all stages use count on all ranks.
    """
    first = 0 in stages
    if not first:
        yield from (("", weights) for weights in trace.parts["embed"].weights if weights.shared == "pipeline")
    for stage in stages:
        for index, part in enumerate(stage_parts(trace, layout, stage)):
            for weights in part.weights:
                if not (weights.copy and first):
                    yield f"{stage} {index}", weights


def buckets(trace: Trace, layout: Layout, stages: list[int]) -> list[Bucket]:
    """Return the buckets of some stages of one rank, in the order of training/buckets.py but with the vectors anywhere."""
    sizes = {"dense": layout.context * layout.expert * layout.data, "data": layout.context * layout.data}
    found: dict[tuple[str, str], Bucket] = {}
    for name, weights in rank_weights(trace, layout, stages):
        if weights.fixed:
            continue
        shared = weights.shared if layout.pipeline > 1 else ""
        unit = weights.unit or name if weights.matrix or shared else "vectors"
        key = f"{shared} {unit}", weights.axis
        if key not in found:
            found[key] = Bucket(weights.axis, sizes[weights.axis], shared=_other_ranks(shared, layout), decays=weights.matrix)
        bucket = found[key]
        bucket.elements += weights.elements
        bucket.summed += weights.elements if weights.summed else 0
        # Ranks of different pipeline stages each use their own copy.
        bucket.gathers = max(bucket.gathers, 1 if shared == "tied_embedding" else weights.gathers)
    return [bucket.padded() for bucket in found.values()]


def _other_ranks(shared: str, layout: Layout) -> str:
    """The axis over which the gradient of a shared weight is summed; empty if one rank holds all its copies."""
    if shared == "tied_embedding" and layout.holder(0) == layout.holder(layout.stage_count - 1):
        return ""
    return shared


def reductions(held: list[Bucket], layout: Layout, zero_stage: int, gradient_bytes: int = FP32) -> list[Exchange]:
    """Return the reductions of gradients in a step."""
    kind: Kind = "all_reduce" if zero_stage == 0 else "reduce_scatter"
    found = []
    for bucket in held:
        count = layout.micro_batches if zero_stage >= 2 and not bucket.shared else 1
        if bucket.summed:
            found.append(Exchange(Collective("all_reduce", "tensor", "backward", float(gradient_bytes * bucket.summed)), count))
        if bucket.ranks > 1:
            found.append(Exchange(Collective(kind, bucket.axis, "backward", float(gradient_bytes * bucket.elements)), count))
        if bucket.shared:
            found.append(Exchange(Collective("all_reduce", bucket.shared, "backward", float(gradient_bytes * bucket.elements)), 1))
    return found


def gathers(held: list[Bucket], layout: Layout, zero_stage: int, weight_bytes: int) -> list[Exchange]:
    """Return the gatherings of weights in a step: after it, or under ZeRO 3 before every use of matrices."""
    found = []
    for bucket in held:
        if zero_stage == 0 or bucket.ranks == 1:
            continue
        count = bucket.gathers * layout.micro_batches if zero_stage == 3 and bucket.decays else 1
        phase: Phase = "forward"
        found.append(Exchange(Collective("all_gather", bucket.axis, phase, float(weight_bytes * bucket.elements)), count))
    return found


def sends(layout: Layout, rank: int, hidden_bytes: float, states: int = 1) -> list[Exchange]:
    """Return the activations and gradients that a pipeline rank sends in a step.

    Args:
        layout: of the job.
        rank: coordinate on the pipeline axis.
        hidden_bytes: of one hidden state of a micro-batch.
        states: number of hidden states between stages (encoder-decoders: 2).
    """
    found = []
    for stage in layout.stages(rank):
        for phase, other in (("forward", stage + 1), ("backward", stage - 1)):
            if 0 <= other < layout.stage_count and layout.holder(other) != rank:
                found.append(Exchange(Collective("send", "pipeline", phase, hidden_bytes), states * layout.micro_batches))  # type: ignore[arg-type]
    return found
