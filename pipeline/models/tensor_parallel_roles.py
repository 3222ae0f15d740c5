"""The roles of the tensor-parallel table, which specifies how tensor and expert parallelism shard every weight of a family.

A table (models/NAME/tensor_parallel.py) maps patterns (fnmatch, on parameter names) to roles. Tensor and expert parallelism shard modules
by it, checkpoints shard and merge weights by it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

#: role -> mesh axis -> the dim that is sharded over its ranks.
#: column and row are the parallel linear layers of Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053), vocab is a matrix
#: with a row for each token. The bias of a row-parallel layer is added after the all-reduce: replicate. partial is replicated too, but used
#: on sharded activations: the gradients of the tensor ranks have to be summed. A norm over a width that is sharded is column. Experts are
#: stacks (experts, output, input) of such layers; expert_partial is partial of them.
SPLITS: dict[str, dict[str, int]] = {
    "column": {"tensor": 0},
    "row": {"tensor": 1},
    "vocab": {"tensor": 0},
    "replicate": {},
    "partial": {},
    "expert_column": {"expert": 0, "tensor": 1},
    "expert_row": {"expert": 0, "tensor": 2},
    "expert_partial": {"expert": 0},
}

#: Role of the weight of a linear layer, or of experts -> the roles of its adapter's weights (layers/lora.py): `a` is split as the layer's
#: inputs are, `b` as its outputs are. The other one of the two is used on sharded activations.
LORA_ROLES: dict[str, dict[str, str]] = {
    "column": {"a": "partial", "b": "column"},
    "row": {"a": "row", "b": "partial"},
    "replicate": {"a": "replicate", "b": "replicate"},
    "partial": {"a": "partial", "b": "partial"},
    "expert_column": {"a": "expert_partial", "b": "expert_column"},
    "expert_row": {"a": "expert_row", "b": "expert_partial"},
}


def role(table: dict[str, str], name: str) -> str:
    """Return the role of a weight, a key of SPLITS.

    Raises:
        KeyError: no pattern of the table matches the name, or more than one does.
    """
    module, _, part = name.rpartition(".lora.")
    if module:
        matrix, _, factor = part.rpartition(".")  # a matrix of experts, which has no module of its own
        return LORA_ROLES[role(table, f"{module}.{matrix or 'weight'}")][factor]
    matches = [pattern for pattern in table if fnmatchcase(name, pattern)]
    if len(matches) != 1:
        raise KeyError(f"weight {name} is matched by {len(matches)} patterns of the tensor-parallel table, not one: {matches}")
    return table[matches[0]]


def splits(table: dict[str, str], name: str) -> dict[str, int]:
    """Return the sharded dim of a weight for each mesh axis; raises like `role`."""
    return SPLITS[role(table, name)]
