"""Which checkpoints may be averaged: those of one model, tokenizer and kind of adapter."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from pipeline.checkpoint.compatibility import fingerprint_of
from pipeline.checkpoint.lora_adapter import lora_of
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import UserError, Violation
from pipeline.models import config_classes

log = logging.getLogger("pipeline")

_TOKENIZER = "checksum of the tokenizer"
_FIX = "merge checkpoints of one model, tokenizer and kind of adapter"
#: Settings of adapters that two checkpoints may differ in.
_FREE = ("adapter", "dropout")


def check(checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse checkpoints of different models, tokenizers or adapters.

    Raises:
        UserError: with one violation per difference from the first checkpoint.
    """
    first, violations = checkpoints[0], []
    for other in checkpoints[1:]:
        differences = _differences(_settings(first), _settings(other))
        for key, (expected, found) in differences.items():
            violations.append(Violation("PATH", other.path, f"has {key}={found}; {first.path} has {key}={expected}", _FIX))
        names = set(first.names()) ^ set(other.names())
        if names and not differences:
            violations.append(Violation("PATH", other.path, f"has other weights than {first.path}: {', '.join(sorted(names)[:3])}", _FIX))
    if violations:
        raise UserError(violations)
    tokenizers = {checkpoint.path: fingerprint_of(checkpoint.config, checkpoint.path) for checkpoint in checkpoints}
    if unknown := [path for path, tokenizer in tokenizers.items() if tokenizer is None]:
        log.warning("whether all members have the same tokenizer is not known: the data of %s is gone", unknown[0])


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """What members have in common: key -> value."""
    model, lora = config_classes.from_dict(checkpoint.config["model"]), dataclasses.asdict(lora_of(checkpoint.config))
    adapter = {name: value for name, value in lora.items() if name not in _FREE} if lora["rank"] else {"rank": 0}
    return {
        **{f"model.{name}": value for name, value in dataclasses.asdict(model).items()},
        **{f"lora.{name}": value for name, value in adapter.items()},
        _TOKENIZER: fingerprint_of(checkpoint.config, checkpoint.path),
    }


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> both values, where they differ; the family alone if that differs, whose models have other keys."""
    differing = {key: (expected.get(key), found.get(key)) for key in expected | found if expected.get(key) != found.get(key)}
    if None in differing.get(_TOKENIZER, ()):  # not known
        del differing[_TOKENIZER]
    if "model.family" in differing:
        return {"model.family": differing["model.family"]}
    if 0 in differing.get("lora.rank", ()):  # one has no adapter
        return {key: values for key, values in differing.items() if key == "lora.rank" or not key.startswith("lora.")}
    return differing
