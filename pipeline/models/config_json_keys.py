"""Groups of config.json keys that several families share: rotary position embeddings, numbers of blocks, kinds of layers at an interval.

Rotary position embeddings have the current key (rope_parameters) and those of earlier releases (rope_theta, rope_scaling).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from pipeline.models.huggingface_mapping import KeyGroup, positive, refusal
from pipeline.models.rope import KEYS
from pipeline.models.shared_sizes import EncoderDecoderSizes, marked

_TO_HF = {"none": "default"}
_FROM_HF = {"default": "none"}


def _write(config: Any) -> dict[str, Any]:
    """Return the current and the earlier keys: transformers 4 and other readers support only the earlier ones."""
    kind = getattr(config, "rope_scaling", "none")
    values = {key: getattr(config, name) for key, name in KEYS[kind].items()}
    # `truncate` is unknown to earlier releases, and true by default.
    unset = {"mscale": 0, "mscale_all_dim": 0, "truncate": True}
    values = {key: value for key, value in values.items() if value is not None and not (key in unset and value == unset[key])}
    scaling = {"rope_type": _TO_HF.get(kind, kind), **values}
    content = {"rope_theta": config.rope_theta, "rope_parameters": {**scaling, "rope_theta": config.rope_theta}}
    return content if kind == "none" else {**content, "rope_scaling": scaling}


def _read(content: dict[str, Any], kinds: Collection[str] = tuple(KEYS)) -> dict[str, Any]:
    """Return the fields of a models.rope.RopeConfig.

    Args:
        kinds: supported values of model.rope_scaling.

    Raises:
        UserError: an unsupported kind of scaling, or an unsupported key of it.
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    stated = as_object(key, content.get(key))
    parameters = {name: value for name, value in stated.items() if value is not None}
    legacy = parameters.pop("type", "default")
    rope_type = parameters.pop("rope_type", legacy)
    theta = parameters.pop("rope_theta", 10000.0 if content.get("rope_theta") is None else content["rope_theta"])
    kind = _FROM_HF.get(rope_type, rope_type) if isinstance(rope_type, str) else None
    if kind is None or kind not in kinds:
        known = ", ".join(_TO_HF.get(name, name) for name in kinds)
        raise refusal(f"{key}.rope_type", rope_type, f"is not supported by this family; supported are {known}")
    if KEYS[kind] and "factor" not in parameters:
        raise refusal(f"{key}.factor", None, f"is missing, and rope_type={rope_type} needs it", f"set {key}.factor in config.json")
    if parameters.pop("partial_rotary_factor", 1) != 1:
        raise refusal(key, content[key], "has a partial_rotary_factor other than 1, which this family does not support")
    parameters.pop("truncate", None)
    if not isinstance(truncate := stated.get("truncate", True), bool):  # null is no absence here
        raise refusal(f"{key}.truncate", truncate, "must be true or false", "fix config.json")
    if not truncate and "truncate" not in KEYS[kind]:
        raise refusal(f"{key}.truncate", False, f"is not a key of rope_type={rope_type}")
    if "original_max_position_embeddings" in KEYS[kind]:
        parameters.setdefault("original_max_position_embeddings", content.get("max_position_embeddings"))
    for name in sorted(parameters.keys() - KEYS[kind].keys()):
        raise refusal(f"{key}.{name}", parameters[name], f"is not a key of rope_type={rope_type}")
    values = {KEYS[kind][name]: number(f"{key}.{name}", value) for name, value in parameters.items()}
    if "rope_original_positions" in values:
        values["rope_original_positions"] = positive(
            f"{key}.original_max_position_embeddings", parameters["original_max_position_embeddings"]
        )
    if not truncate:
        values["rope_truncate"] = False
    return {"rope_theta": number("rope_theta", theta), "rope_scaling": kind, **values}


def as_object(key: str, value: object) -> dict[str, Any]:
    """Return a value as dict, if it is an object; empty for null."""
    if value is not None and not isinstance(value, dict):
        raise refusal(key, value, "must be an object", "fix config.json")
    return value or {}


def number(key: str, value: object) -> float:
    """Return a value as float, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refusal(key, value, "must be a finite number", "fix config.json")
    return float(value)


def _read_unscaled(content: dict[str, Any]) -> dict[str, Any]:
    """Return rope_theta; scaling is not supported."""
    return {"rope_theta": _read(content, ("none",))["rope_theta"]}


_KEYS = ("rope_theta", "rope_parameters", "rope_scaling")

#: for families whose configuration is a RopeConfig
ROPE = KeyGroup(keys=_KEYS, write=_write, read=_read)
#: for families with rope_theta and without scaling
UNSCALED = KeyGroup(keys=_KEYS, write=_write, read=_read_unscaled)


def with_theta(group: KeyGroup, theta: float) -> KeyGroup:
    """Return ROPE or UNSCALED with another base if config.json has no rope_theta."""
    return replace(group, read=lambda content: group.read({"rope_theta": theta, **content}))


def partial_rope(*, share: float, theta_key: str = "rope_theta", share_key: str = "partial_rotary_factor") -> KeyGroup:
    """Return the keys of families that rotate only the first dims of a head: those of ROPE, and the share of these dims.

    Args:
        share: the share without the keys.
        theta_key: earlier key of the base.
        share_key: earlier key of the share.
    """

    def write(config: Any) -> dict[str, Any]:
        content = _write(config)
        theta, factor = content.pop("rope_theta"), {"partial_rotary_factor": config.partial_rotary_factor}
        return {
            **content,
            "rope_parameters": content["rope_parameters"] | factor,
            theta_key: theta,
            share_key: config.partial_rotary_factor,
        }

    def read(content: dict[str, Any]) -> dict[str, Any]:
        key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
        parameters = dict(as_object(key, content.get(key)))
        factor = parameters.pop("partial_rotary_factor", content.get(share_key, share))
        fields = _read({**content, key: parameters, "rope_theta": content.get(theta_key)})
        return {**fields, "partial_rotary_factor": number(share_key, factor)}

    return KeyGroup((theta_key, share_key, "rope_parameters", "rope_scaling"), write, read)


def layer_counts(encoder_key: str, decoder_key: str, *, default: int, decoder_as_encoder: bool = False) -> KeyGroup:
    """Return the keys with the numbers of blocks of an encoder-decoder, which Hugging Face numbers separately.

    Args:
        encoder_key: key with the number of encoder blocks.
        decoder_key: key with the number of decoder blocks.
        default: number of blocks if a key is missing.
        decoder_as_encoder: whether a missing decoder_key means as many blocks as the encoder has.
    """

    def write(config: EncoderDecoderSizes) -> dict[str, Any]:
        return {encoder_key: config.encoder_blocks, decoder_key: config.decoder_blocks}

    def read(content: dict[str, Any]) -> dict[str, Any]:
        first = content.get(encoder_key, default)
        second = content.get(decoder_key)
        if second is None:
            second = first if decoder_as_encoder else default
        blocks = positive(encoder_key, first), positive(decoder_key, second)
        return {"layers": sum(blocks), "encoder_layers": None if blocks[0] == blocks[1] else blocks[0]}

    return KeyGroup((encoder_key, decoder_key), write, read)


def interval_of(key: str, values: Sequence[Any], special: Any, stated: int) -> int:
    """Return the interval at which a list with an entry per layer has the entry `special`.

    Args:
        key: key of config.json.
        values: its value.
        special: the entry of the layers at the interval.
        stated: the interval that config.json states, which is preferred if it is true of the list: a list may fit several.

    Raises:
        UserError: the list does not follow an interval.
    """
    if not isinstance(stated, int) or isinstance(stated, bool) or stated < 1:
        raise refusal(key, list(values), f"comes with the interval {stated}, which must be an integer of at least 1", "fix config.json")
    is_special = [value == special for value in values]
    first = is_special.index(True) + 1 if any(is_special) else len(is_special) + 1
    for interval in (stated, first):
        if is_special == marked(len(is_special), interval):
            return interval
    raise refusal(key, list(values), f"does not have {special} at a fixed interval of layers, which this family requires")


LOCAL, GLOBAL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def layer_types(*, default: int, interval_key: str = "", field: str = "sliding_window_pattern", other: str = LOCAL) -> KeyGroup:
    """Return the keys with the kind of each layer.

    Args:
        default: interval of the global layers without the keys.
        interval_key: key with that interval, if the class reads one.
        field: field of our configuration with that interval.
        other: the kind of the other layers.
    """
    keys = (*([interval_key] if interval_key else []), "layer_types")

    def write(config: Any) -> dict[str, Any]:
        interval = getattr(config, field)
        kinds = [GLOBAL if is_global else other for is_global in marked(config.layers, interval)]
        return {**({interval_key: interval} if interval_key else {}), "layer_types": kinds}

    def read(content: dict[str, Any]) -> dict[str, Any]:
        """Return the interval; the list takes precedence, as in the classes."""
        interval, kinds = content.get(interval_key, default), content.get("layer_types")
        if kinds is not None and not (isinstance(kinds, list) and all(kind in (other, GLOBAL) for kind in kinds)):
            raise refusal("layer_types", kinds, f"must be a list of {other} and {GLOBAL}")
        if kinds is not None and len(kinds) != (layers := content.get("num_hidden_layers", len(kinds))):
            raise refusal("layer_types", kinds, f"has {len(kinds)} entries for num_hidden_layers={layers}", "correct config.json")
        return {field: interval if kinds is None else interval_of("layer_types", kinds, GLOBAL, interval)}

    return KeyGroup(keys, write, read)


def rope_by_kind(*, theta: float, local_theta: float, positions: int, local_key: str = "") -> KeyGroup:
    """Return the keys of the rotary positions; those of the local layers are not scaled.

    Args:
        theta: base of the global layers without the keys.
        local_theta: base of the local layers without the keys.
        positions: default of max_position_embeddings.
        local_key: key of earlier releases with the base of the local layers; empty for rope_theta, in which these differ.
    """

    def write(config: Any) -> dict[str, Any]:
        """Return the current keys, by kind of layer, and those of earlier releases."""
        of_global = ROPE.write(config)
        parameters = {GLOBAL: of_global["rope_parameters"], LOCAL: {"rope_type": "default", "rope_theta": config.rope_local_theta}}
        legacy = {local_key: config.rope_local_theta} if local_key else {}
        return {**of_global, "rope_parameters": parameters, **legacy}

    def read(content: dict[str, Any]) -> dict[str, Any]:
        """Return the rotary fields.

        Raises:
            UserError: an unsupported kind of scaling, a scaling of the local layers, or parameters without the kind of layer.
        """
        parameters = as_object("rope_parameters", content.get("rope_parameters"))
        for key in sorted(parameters.keys() - {LOCAL, GLOBAL}):
            raise refusal(f"rope_parameters.{key}", parameters[key], f"must be {LOCAL} or {GLOBAL}, the kind of layer", "fix config.json")
        local, of_global = (
            {"rope_type": "default", **as_object(f"rope_parameters.{kind}", parameters.get(kind))} for kind in (LOCAL, GLOBAL)
        )
        if local["rope_type"] != "default":
            raise refusal(f"rope_parameters.{LOCAL}.rope_type", local["rope_type"], "is not supported by this family; only default is")
        if not local_key and "rope_theta" not in local and content.get("rope_theta", local_theta) != local_theta:
            rule = f"is the base of all layers in transformers 4, and in transformers 5 not of those with {LOCAL}"
            raise refusal("rope_theta", content["rope_theta"], rule, f"set rope_parameters.{LOCAL}.rope_theta in config.json")
        of_global = {"rope_theta": content.get("rope_theta", theta), **of_global, **as_object("rope_scaling", content.get("rope_scaling"))}
        fields = ROPE.read({"rope_parameters": of_global, "max_position_embeddings": content.get("max_position_embeddings", positions)})
        base = local.get("rope_theta", content.get(local_key, local_theta))
        return {**fields, "rope_local_theta": number(f"rope_parameters.{LOCAL}.rope_theta", base)}

    keys = ("rope_theta", "rope_parameters", "rope_scaling", *([local_key] if local_key else []))
    return KeyGroup(keys, write, read)
