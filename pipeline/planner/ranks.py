"""Model state of the ranks of a layout, from their part of the model; and what other frameworks hold in the same layout."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

from pipeline.config.layout import Coordinates, Layout
from pipeline.config.schema import RunConfig
from pipeline.layers.nf4 import stored_bytes
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import DTYPES, LocalModel, layers_in_4_bits
from pipeline.planner.exchange import buckets, rank_weights
from pipeline.planner.memory import FP32, ModelState, StateFormat, model_state
from pipeline.planner.trace import Trace
from pipeline.training.buckets import build_buckets
from pipeline.training.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Held:
    """Number of parameters of a rank before ZeRO.

    Attributes:
        dense: of weights that all expert ranks hold.
        experts: of weights that are sharded over the expert axis.
    """

    dense: int
    experts: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def rank_state(config: RunConfig, model: LocalModel, mesh: Mesh) -> ModelState:
    """Return the bytes of a rank's state from its buckets, as training/ shards them. The model is on the meta device."""
    trained = copy(model)
    trained.pieces = {parameter: piece for parameter, piece in model.pieces.items() if parameter not in model.frozen}
    state = model_state(build_buckets(trained, mesh, sequence_parallel=config.parallel.sequence_parallel), state_format(config))
    return replace(state, weights=state.weights + frozen_bytes(config, model))


def state_format(config: RunConfig) -> StateFormat:
    """Return how the ranks of a job keep their weights."""
    weight_bytes = DTYPES[config.precision.dtype].itemsize
    return StateFormat(config.parallel.zero_stage, weight_bytes, len(OPTIMIZERS[config.optimizer.name].state))


def frozen_bytes(config: RunConfig, model: LocalModel) -> int:
    """Return the bytes of the weights that are not trained, on the meta device. They are not sharded over data ranks."""
    in_4_bits = {layer.weight for layer in layers_in_4_bits(config, model)}
    itemsize = DTYPES[config.precision.dtype].itemsize
    return sum(stored_bytes(*p.shape) if p in in_4_bits else p.numel() * itemsize for p in model.frozen)


def fullest_rank(traced: Trace, layout: Layout) -> tuple[int, Held]:
    """Return the rank that holds the most parameters, and their numbers. Ranks that differ in other axes hold no more."""
    found = {}
    for pipeline in range(layout.pipeline):
        rank = layout.rank(Coordinates(pipeline=pipeline, data=0, expert=0, context=0, tensor=0))
        weights = [weights for _, weights in rank_weights(traced, layout, layout.stages(pipeline))]
        elements = {axis: sum(w.elements for w in weights if w.axis == axis) for axis in ("dense", "data")}
        found[rank] = Held(elements["dense"], elements["data"])
    rank = max(found, key=lambda rank: found[rank].total)
    return rank, found[rank]


def planned_state(config: RunConfig, traced: Trace, layout: Layout, rank: int) -> ModelState:
    """Return the bytes of a rank's state from the traced weights."""
    held = buckets(traced, layout, layout.stages(layout.coordinates(rank).pipeline))
    return model_state(held, state_format(config))


def megatron_bytes(config: RunConfig, layout: Layout, held: Held) -> float:
    """Return the model state of Megatron-LM's distributed optimizer in the same layout.

    Weights, fp32 gradients, and 12 bytes of fp32 master weight and two moments over the ranks that hold the same weight: those of data and
    context, for dense weights also of the expert axis (Megatron-LM, docs/source/api-guide/dist_optimizer.md).
    """
    whole, data = DTYPES[config.precision.dtype].itemsize + FP32, layout.data * layout.context
    return held.total * whole + 3 * FP32 * (held.dense / (data * layout.expert) + held.experts / data)


def fsdp2_bytes(layout: Layout, held: Held) -> float:
    """Return the model state of PyTorch's FSDP2 in the same layout, with the mesh axes that shard the same weights flattened to one.

    fp32 weights, gradients and two moments, all sharded; without the gathered weights of the blocks in use.
    """
    data = layout.data * layout.context
    return 4 * FP32 * (held.dense / (data * layout.expert) + held.experts / data)
