"""The rule by which weights are grouped into gradient buckets: training/buckets.py builds them, planner/planned_buckets.py plans them."""

from __future__ import annotations

import math

#: Name of the bucket of all vectors.
VECTORS = "vectors"
#: Elements to which partitions are aligned, 256 bytes in 16 bits: NCCL and vectorized kernels are slower if they are not at 16 bytes.
ALIGNMENT = 128


def bucket_name(name: str, unit: str, *, matrix: bool, shared: bool, muon: bool = False) -> str:
    """Return the bucket of a weight, among the weights that the same ranks hold.

    Args:
        name: of the weight in the full model.
        unit: the block that holds it, or the embedding, the head or another module of the stage.
        matrix: whether it has two dimensions or more.
        shared: whether several pipeline stages hold it.
        muon: whether Muon updates it: it then has other state than the matrices beside it that AdamW updates.
    """
    if shared:
        return name
    if not matrix:
        return VECTORS
    return f"{unit} muon" if muon else unit


def padded_elements(elements: int, ranks: int) -> int:
    """Return the elements of a bucket with the padding that divides it into one partition per rank.

    Partitions start at multiples of ALIGNMENT elements.
    """
    alignment = ALIGNMENT * ranks
    return math.ceil(elements / alignment) * alignment
