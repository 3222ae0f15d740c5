"""Rules of stage=convert: an import, and an export of an adapter or of optimizer state, read few of its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.rules import quantization
from pipeline.config.stages import Convert

#: What an import reads, and the export of an adapter. quantization.py refuses stage.quantize and what belongs to it.
_IMPORT = ("name", "input", "shard_gigabytes")
_ADAPTER = ("name", "format", "output", "checkpoint", "weights")
_UNIVERSAL = ("name", "format", "output", "checkpoint")
_QUANTIZATION = ("quantize", "symmetric", "granularity", "group_size", "rounding", "calibration", "held_out", "sample_tokens")


def violations(stage: Convert) -> Iterator[Violation]:
    """Yield the rules that the settings of the stage violate, as far as they do not depend on the model."""
    if stage.input is not None:
        fix = "remove it, and export the imported checkpoint by a second stage=convert without stage.input"
        yield from _unread(stage, _IMPORT, "is read by an export, and stage.input imports", fix)
    elif stage.format == "peft":
        yield from _unread(stage, _ADAPTER, "has no effect with stage.format=peft, which exports the adapter alone, fp32", "remove it")
    elif stage.format == "deepspeed_universal":
        rule = "has no effect with stage.format=deepspeed_universal, which exports the trained fp32 weights with their moments"
        yield from _unread(stage, _UNIVERSAL, rule, "remove it, or set stage.format=huggingface")
    yield from quantization.violations(stage)


def _unread(stage: Convert, read: tuple[str, ...], rule: str, fix: str) -> Iterator[Violation]:
    """Keys that are not read, and do not have their defaults."""
    default = Convert(name=stage.name)
    for field in dataclasses.fields(stage):
        value = getattr(stage, field.name)
        if field.name not in (*read, *_QUANTIZATION) and value != getattr(default, field.name):
            yield Violation(f"stage.{field.name}", value, rule, fix)
