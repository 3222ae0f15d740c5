"""Groups of config.json keys of families with two kinds of layers, one of them full attention, and rotary positions for each."""

from __future__ import annotations

from typing import Any

from pipeline.models.config_json_keys import ROPE, as_object, interval_of, number
from pipeline.models.huggingface_mapping import KeyGroup, refusal
from pipeline.models.shared_sizes import marked

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
        found = local.get("rope_theta", content.get(local_key, local_theta))
        return {**fields, "rope_local_theta": number(f"rope_parameters.{LOCAL}.rope_theta", found)}

    keys = ("rope_theta", "rope_parameters", "rope_scaling", *([local_key] if local_key else []))
    return KeyGroup(keys, write, read)
