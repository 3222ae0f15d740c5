"""The parallel plan: a table that says of every weight how parallelism splits it.

A family's plan maps patterns (fnmatch, on parameter names) to roles. Tensor and expert parallelism cut modules by it,
checkpoints cut and join pieces by it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

#: role -> mesh axis -> the dim that is split over its ranks.
#: column and row are the linear layers of Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053), vocab is a matrix with a
#: row for each token. A row layer's bias is added after the sum: replicate. partial is held whole by every tensor rank too, but within
#: a region of cut weights: each rank's gradient is a part. Experts are stacks (experts, output, input) of such layers.
SPLITS: dict[str, dict[str, int]] = {
    "column": {"tensor": 0},
    "row": {"tensor": 1},
    "vocab": {"tensor": 0},
    "replicate": {},
    "partial": {},
    "expert_column": {"expert": 0, "tensor": 1},
    "expert_row": {"expert": 0, "tensor": 2},
}


def role(plan: dict[str, str], name: str) -> str:
    """The role of a weight, a key of SPLITS.

    Raises:
        KeyError: no pattern of the plan matches the name, or more than one does. A plan is complete and says everything once.
    """
    matches = [pattern for pattern in plan if fnmatchcase(name, pattern)]
    if len(matches) != 1:
        raise KeyError(f"weight {name} is matched by {len(matches)} patterns of the parallel plan, not one: {matches}")
    return plan[matches[0]]


def splits(plan: dict[str, str], name: str) -> dict[str, int]:
    """The dims along which a weight is split, by axis; raises as `role` does."""
    return SPLITS[role(plan, name)]
