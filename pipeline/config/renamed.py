"""Renamed and removed configuration keys: the command line rejects them, and the configuration of an older checkpoint is updated."""

from __future__ import annotations

from typing import Any

#: old key -> new key
RENAMED = {
    "training.batch_warmup": "training.batch_rampup",
    "stage.roofline": "stage.plot",
    "model.query_rank": "model.q_lora_rank",
    "model.key_value_rank": "model.kv_lora_rank",
    "model.plain_dim": "model.qk_nope_head_dim",
    "model.rotary_dim": "model.qk_rope_head_dim",
    "model.value_dim": "model.v_head_dim",
    "model.groups_chosen": "model.topk_group",
    "model.normalise_weights": "model.norm_topk_prob",
    "model.routed_factor": "model.routed_scaling_factor",
    "model.bias_step": "training.bias_update_speed",
    "model.balance_loss": "training.balance_loss",
    "model.z_loss": "training.z_loss",
    "model.bias_update_speed": "training.bias_update_speed",
    "model.mtp_loss": "training.mtp_loss",
}

#: removed key -> what replaces it
REMOVED = {
    "stage.table": "run tools/plan_table ROWS.csv OUT.csv",
    "data.instructions.truncate": "set data.instructions.too_long to truncate, drop or refuse",
}


def new_name(key: str) -> str | None:
    """Return the new name of a key or of a key below it (`training.batch_warmup.0.value`), None if it was not renamed."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return None


def update(config: dict[str, Any]) -> None:
    """Rename the keys of a saved configuration (nested dictionaries) in place."""
    for old, new in RENAMED.items():
        (group, _, name), (target, _, replacement) = old.partition("."), new.partition(".")
        if name in config.get(group, {}):
            config.setdefault(target, {})[replacement] = config[group].pop(name)
