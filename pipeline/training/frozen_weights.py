"""Frozen weights under ZeRO 3: matrices in the dtype of the model are divided like trained ones, without master weights and gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import nn

from pipeline.layers.linear import Linear
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.parallel.tensor_parallel import joint_layers
from pipeline.training.buckets import Bucket, build_buckets
from pipeline.training.weight_gathering import FlatWeights

log = logging.getLogger("pipeline")


@torch.no_grad()
def shard_frozen(model: LocalModel, mesh: Mesh) -> list[FlatWeights]:
    """Allocate LocalModel.sharded, one bucket after the other, and return the buckets with this rank's partitions."""
    buckets = build_buckets(model, mesh, sequence_parallel=False, pieces=model.sharded)
    joint = list(joint_layers(model.stages))
    sharded = [_partitioned(bucket, model.materialize, joint) for bucket in buckets]
    if sharded:
        mine, whole = sum(weights.partition.nbytes for weights in sharded), sum(weights.flat.nbytes for weights in sharded)
        log.info("zero 3: %d frozen weights, %.1f MB on this rank instead of %.1f MB", len(model.sharded), mine / 1e6, whole / 1e6)
    return sharded


def _partitioned(bucket: Bucket, materialize: Callable[[nn.Parameter], None], joint: Iterable[tuple[Linear, ...]]) -> FlatWeights:
    """Allocate the weights of a bucket as views of a flat tensor, keep this rank's partition of it, and free the others.

    Args:
        bucket: of frozen weights.
        materialize: allocates and draws one.
        joint: layers that are computed as one: else each product would save a concatenated copy of their weights.
    """
    first = next(iter(bucket.pieces))
    flat = torch.zeros(bucket.elements, dtype=first.dtype, device=first.device)
    for parameter in bucket.pieces:
        materialize(parameter)
        parameter.data = bucket.view(flat, parameter).copy_(parameter.data)
    for layers in joint:
        weights = [layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter)]
        if weights[0] in bucket.pieces:
            layers[0].joined = bucket.joint_view(flat, weights)
    partition = flat.narrow(0, bucket.group.rank() * bucket.partition_elements, bucket.partition_elements)
    freed = bucket.group.size() > 1
    partitioned = FlatWeights(bucket, flat, partition.clone() if freed else partition, freed=freed, trained=False)
    partitioned.free()
    return partitioned
