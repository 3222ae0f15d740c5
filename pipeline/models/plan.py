"""The parallel plan: a table that says of every weight how tensor parallelism splits it.

A family's plan maps patterns (fnmatch, on parameter names) to roles. Tensor parallelism swaps modules by it,
checkpoints cut and join pieces by it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

#: role -> the dim that is split over the tensor ranks, None where every rank holds the whole weight.
#: column and row are the linear layers of Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053),
#: vocab is a matrix with a row for each token. A row layer's bias is added after the sum: replicate.
SPLIT_DIM: dict[str, int | None] = {"column": 0, "row": 1, "vocab": 0, "replicate": None}


def role(plan: dict[str, str], name: str) -> str:
    """The role of a weight: column | row | vocab | replicate.

    Raises:
        KeyError: no pattern of the plan matches the name, or more than one does. A plan is complete and says everything once.
    """
    matches = [pattern for pattern in plan if fnmatchcase(name, pattern)]
    if len(matches) != 1:
        raise KeyError(f"weight {name} is matched by {len(matches)} patterns of the parallel plan, not one: {matches}")
    return plan[matches[0]]


def split_dim(plan: dict[str, str], name: str) -> int | None:
    """The dim along which a weight is split, None where it is not; raises as `role` does."""
    return SPLIT_DIM[role(plan, name)]
