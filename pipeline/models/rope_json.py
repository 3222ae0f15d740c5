"""Rotary positions in config.json, in the spelling of today (rope_parameters) and of former releases (rope_theta, rope_scaling)."""

from __future__ import annotations

from typing import Any

from pipeline.models.adapter import Nested, refusal
from pipeline.models.rope import KEYS

_STOCK = {"none": "default"}
_OURS = {"default": "none"}


def _write(config: Any) -> dict[str, Any]:
    """Both spellings: stock transformers 4 and other readers know the former alone."""
    kind = getattr(config, "rope_scaling", "none")
    values = {theirs: getattr(config, ours) for theirs, ours in KEYS[kind].items()}
    kept = {key: value for key, value in values.items() if value is not None and not (key.startswith("mscale") and value == 0)}
    scaling = {"rope_type": _STOCK.get(kind, kind), **kept}
    content = {"rope_theta": config.rope_theta, "rope_parameters": {**scaling, "rope_theta": config.rope_theta}}
    return content if kind == "none" else {**content, "rope_scaling": scaling}


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """Our fields, those of a models.rope.RopeConfig.

    Raises:
        UserError: a way of scaling, or a key of it, that we do not have.
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    parameters = {name: value for name, value in (content.get(key) or {}).items() if value is not None}
    older = parameters.pop("type", "default")
    kind = parameters.pop("rope_type", older)
    theta = parameters.pop("rope_theta", content.get("rope_theta") or 10000.0)
    ours = _OURS.get(kind, kind)
    if ours not in KEYS:
        known = ", ".join(_STOCK.get(name, name) for name in KEYS)
        raise refusal(f"{key}.rope_type", kind, f"is no rotary positions that this family has; {known} are all it knows")
    if KEYS[ours] and "factor" not in parameters:
        raise refusal(f"{key}.factor", None, f"is missing, and rope_type={kind} needs it", f"set {key}.factor in config.json")
    if parameters.pop("truncate", True) is not True or parameters.pop("partial_rotary_factor", 1) != 1:
        raise refusal(key, content[key], "rounds the ends of yarn's ramp, and turns whole heads, in every family here")
    if "original_max_position_embeddings" in KEYS[ours]:
        parameters.setdefault("original_max_position_embeddings", content.get("max_position_embeddings"))
    for name in parameters.keys() - KEYS[ours].keys():
        raise refusal(f"{key}.{name}", parameters[name], f"is nothing that rope_type={kind} has")
    fields = {KEYS[ours][name]: value for name, value in parameters.items()}
    typed = {name: int(value) if name == "rope_original_positions" else float(value) for name, value in fields.items()}
    return {"rope_theta": float(theta), "rope_scaling": ours, **typed}


def _read_unscaled(content: dict[str, Any]) -> dict[str, Any]:
    """The base of the wave lengths alone."""
    fields = _read(content)
    if fields["rope_scaling"] != "none":
        key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
        raise refusal(f"{key}.rope_type", fields["rope_scaling"], "is no rotary positions that this family has; default is all it knows")
    return {"rope_theta": fields["rope_theta"]}


_KEYS = ("rope_theta", "rope_parameters", "rope_scaling")

#: for a family whose configuration is a RopeConfig
ROPE = Nested(keys=_KEYS, write=_write, read=_read)
#: for one that has rope_theta and no more
UNSCALED = Nested(keys=_KEYS, write=_write, read=_read_unscaled)
