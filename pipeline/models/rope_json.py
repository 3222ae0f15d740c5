"""Rotary positions in config.json, in the spelling of today (rope_parameters) and of former releases (rope_theta, rope_scaling)."""

from __future__ import annotations

from typing import Any

from pipeline.models.adapter import Nested, refusal


def _write(config: Any) -> dict[str, Any]:
    """Both spellings: stock transformers 4 and other readers know the former alone."""
    return {"rope_theta": config.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """The base of the wave lengths, unscaled."""
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    parameters = dict(content.get(key) or {})
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", content.get("rope_theta") or 10000.0)
    if kind != "default":
        raise refusal(f"{key}.rope_type", kind, "is no rotary positions that this family has; default is all it knows")
    for name, value in parameters.items():
        raise refusal(f"{key}.{name}", value, f"is nothing that rope_type={kind} has")
    return {"rope_theta": float(theta)}


ROPE = Nested(keys=("rope_theta", "rope_parameters", "rope_scaling"), write=_write, read=_read)
