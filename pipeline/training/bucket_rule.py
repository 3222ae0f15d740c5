"""The rule by which weights are grouped into gradient buckets: training/buckets.py builds them, planner/planned_buckets.py plans them."""

from __future__ import annotations

import math

#: Name of the bucket of all vectors.
VECTORS = "vectors"


def bucket_name(name: str, unit: str, *, matrix: bool, shared: bool) -> str:
    """Return the bucket of a weight, among the weights that the same ranks hold.

    Args:
        name: of the weight in the full model.
        unit: the block that holds it, or the embedding, the head or another module of the stage.
        matrix: whether it has two dimensions or more.
        shared: whether several pipeline stages hold it.
    """
    if shared:
        return name
    return unit if matrix else VECTORS


def padded_elements(elements: int, ranks: int) -> int:
    """Return the elements of a bucket with the padding that divides it into one partition per rank.

    Partitions start at even elements: DeepSpeed aligns the partitions of 16-bit weights to 4 bytes.
    """
    alignment = 2 * ranks
    return math.ceil(elements / alignment) * alignment
