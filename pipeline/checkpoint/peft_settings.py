"""The keys of adapter_config.json: those that the import reads, those without effect on a trained adapter, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.common.errors import UserError, Violation

#: Keys that peft_format.py reads. The ranks of rank_pattern and the modules of the others are those of the tensors.
READ = frozenset(("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "modules_to_save", "ensure_weight_tying"))
#: Keys without effect on the logits of a trained adapter: its origin, its training, and the choice of modules, which the tensors show.
INERT = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "runtime_config"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "fan_in_fan_out"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core"),
    )
)
#: Keys of other methods than LoRA of linear layers -> the values with which they are off.
_OFF: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config", "megatron_config"), (None,)),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens", "trainable_token_indices", "target_parameters"), (None, [])),
}
#: Initial values (init_lora_weights) that leave the base as it is: True is null in old files.
_UNCHANGED_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
#: Initial values with which PEFT changes the base in the same way again when it loads the adapter.
_REPEATED = ("pissa", "olora")
#: All keys that are known; others come from newer releases.
KNOWN = READ | INERT | _OFF.keys() | {"init_lora_weights"}


def check(settings: dict[str, Any], folder: Path, key: str) -> None:
    """Refuse an adapter that is more than products of two factors, added to the weights of linear layers of an unchanged base.

    Args:
        settings: content of adapter_config.json.

    Raises:
        UserError: with a violation for each setting.
    """
    UserError.raise_for(_violations(settings, folder, key))


def _violations(settings: dict[str, Any], folder: Path, key: str) -> Iterator[Violation]:
    """Yield a violation for each setting that is not supported."""
    for name, values in _OFF.items():
        if name in settings and not _is_one_of(settings[name], values):
            rule = f"has {name}={json.dumps(settings[name])}, which is not supported"
            yield Violation(key, folder, rule, "use a LoRA adapter of linear layers, or merge it in PEFT and import the model")
    for name in sorted(settings.keys() - KNOWN):
        if settings[name]:
            rule = f"has {name}={json.dumps(settings[name])}, a key that is not known here"
            yield Violation(key, folder, rule, "merge it in PEFT (merge_and_unload) and import the model, or remove a key without effect")
    kind = settings.get("init_lora_weights")
    if not _is_one_of(kind, _UNCHANGED_BASE):
        rule = f"has init_lora_weights={json.dumps(kind)}: its training changed the weights of the base first, which are not in the adapter"
        yield Violation(key, folder, rule, _fix(str(kind).lower()))


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value is one of them; 0 is not False."""
    return any(type(value) is type(other) and value == other for other in values)


def _fix(kind: str) -> str:
    """Return how to get the model or an adapter of the unchanged base."""
    if kind in _REPEATED:
        merge = "PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(...), and import the model"
        return f"save it in PEFT with path_initial_model_for_weight_conversion, or merge it there: {merge}"
    merge = "merge it in PEFT where it was trained, with the changed base (merge_and_unload), and import the model"
    return merge if kind == "loftq" else f"{merge}, or save it there with path_initial_model_for_weight_conversion"
