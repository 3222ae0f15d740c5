"""How tensor and expert parallelism shard every weight of all families: by the end of its name.

Parallelism shards modules by these roles, checkpoints shard and merge weights by them.
"""

from __future__ import annotations

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
#: The same for stacks of experts that are whole on every rank (parallel.expert_tensor=1): the tensor ranks divide those of an expert rank.
FOLDED: dict[str, int] = {"expert": 0, "tensor": 0}

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


#: Role -> ends of the names of its weights, without numbers.
_ENDS: dict[str, tuple[str, ...]] = {
    "vocab": ("tokens.weight", "head.weight", "head.bias", "head.output.weight", "head.output.bias"),
    "column": (
        *("query.weight", "query.bias", "key.weight", "key.bias", "value.weight", "value.bias"),
        *("gate.weight", "up.weight", "up.bias"),
        *("attention.sinks", "encoder_bias.weight", "decoder_bias.weight"),
        *("query_up.weight", "key_value_up.weight"),  # of latents, which every tensor rank has whole
        # layers with a recurrent state: a rank has whole key heads, or groups, with the heads that share them
        *("beta.weight", "decay.weight", "decay_up.weight", "gate_up.weight"),
        *("group_query.weight", "group_key.weight", "group_norm.weight"),
        *("attention.decay_rate_log", "attention.decay_bias", "attention.skip", "attention.query_conv", "attention.key_conv"),
        *(f"attention.{name}_conv{bias}" for name in ("value", "group_query", "group_key") for bias in ("", "_bias")),
    ),
    "row": ("output.weight", "down.weight"),
    "replicate": (
        *("output.bias", "down.bias", "positions.weight", "segments.weight", "project.weight", "shared_gate.weight", "router.bias"),
        *("layer_input.gate.weight", "blocks.layer_scalar"),
        *(f"{name}.{kind}" for name in ("norm", "attention_norm", "cross_norm", "mlp_norm", "dense") for kind in ("weight", "bias")),
        *(f"{name}.weight" for name in ("post_attention_norm", "post_mlp_norm", "token_norm", "hidden_norm", "final_norm", "output_norm")),
    ),
    "partial": (
        *("query_norm.weight", "key_norm.weight", "attention.output_norm.weight"),  # applied to each rank's own heads
        *("query_down.weight", "key_value_down.weight", "key_value_norm.weight", "decay_down.weight", "gate_down.weight"),
        *("router.weight", "router.logit_bias", "activation.alpha_p", "activation.alpha_n"),
        *(f"sentence.{name}.{kind}" for name in ("dense", "output") for kind in ("weight", "bias")),
    ),
    "expert_column": ("experts.gate", "experts.up", "experts.gate_bias", "experts.up_bias"),
    "expert_row": ("experts.down",),
    "expert_partial": ("experts.down_bias",),  # whole on every rank, which adds its share of it to a partial sum
}
#: End of the name of a weight -> its role; a longer end comes before a shorter one.
ROLES: dict[str, str] = {end: name for name, ends in _ENDS.items() for end in ends}
#: The same for families whose heads of Mamba-2 layers are one group: each rank has its queries and keys, and some of the heads.
WITH_ONE_GROUP = {**ROLES, **{end: "partial" for end in ROLES if "group_query" in end or "group_key" in end}}
#: The same for families whose norms of queries and keys are over the heads of all ranks.
WITH_WIDTH_NORMS = {**ROLES, "query_norm.weight": "column", "key_norm.weight": "column"}


def role(table: dict[str, str], name: str) -> str:
    """Return the role of a weight, a key of SPLITS.

    Args:
        table: ROLES, or WITH_WIDTH_NORMS.
        name: of the weight.

    Raises:
        KeyError: the table has no end of the name.
    """
    module, _, part = name.rpartition(".lora.")
    if module:
        matrix, _, factor = part.rpartition(".")  # a matrix of experts, which has no module of its own
        return LORA_ROLES[role(table, f"{module}.{matrix or 'weight'}")][factor]
    parts = [part for part in name.split(".") if not part.isdigit()]
    for length in (3, 2):
        if (end := ".".join(parts[-length:])) in table:
            return table[end]
    raise KeyError(f"weight {name} has no role: pipeline/models/tensor_parallel_roles.py does not list {end}")


def splits(table: dict[str, str], name: str) -> dict[str, int]:
    """Return the sharded dim of a weight for each mesh axis; raises like `role`."""
    return SPLITS[role(table, name)]
