"""Rules of stage=convert: what imports and exports of an adapter or of optimizer state read, and how an export is quantized."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.stages import Convert

#: What an import reads, and the export of an adapter. `_quantization` refuses stage.quantize and what belongs to it.
_IMPORT = ("name", "input", "shard_gigabytes")
_ADAPTER = ("name", "format", "output", "checkpoint", "weights")
_UNIVERSAL = ("name", "format", "output", "checkpoint")
#: The types of stage.format=gguf.
_GGUF = ("q8_0", "q4_0", "q4_k")
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
    yield from _quantization(stage)


def _unread(stage: Convert, read: tuple[str, ...], rule: str, fix: str) -> Iterator[Violation]:
    """Keys that are not read, and do not have their defaults."""
    default = Convert(name=stage.name)
    for field in dataclasses.fields(stage):
        value = getattr(stage, field.name)
        if field.name not in (*read, *_QUANTIZATION) and value != getattr(default, field.name):
            yield Violation(f"stage.{field.name}", value, rule, fix)


def _quantization(stage: Convert) -> Iterator[Violation]:
    """The keys that quantize an export."""
    kind = stage.quantize
    if kind == "none":
        for key in _QUANTIZATION[1:]:
            yield from _without_effect(stage, key, "with stage.quantize=none", "set stage.quantize, for example int4")
        return
    if stage.input is not None:
        fix = "import without it first, then quantize the checkpoint: stage=convert stage.quantize=... with the same run_dir"
        yield Violation("stage.quantize", kind, "applies to an export, and stage.input imports", fix)
    if stage.format not in ("huggingface", "gguf"):
        yield Violation("stage.quantize", kind, f"is not supported by stage.format={stage.format}", "set stage.format=huggingface")
        return
    if (kind in _GGUF) != (stage.format == "gguf"):
        rule = "requires stage.format=gguf" if kind in _GGUF else "is not a type of stage.format=gguf"
        fix = "set stage.format=gguf" if kind in _GGUF else "set stage.quantize=q8_0 or q4_0, or stage.format=huggingface"
        yield Violation("stage.quantize", kind, rule, fix)
        return
    if kind in _GGUF and stage.rounding != "nearest":
        yield Violation("stage.rounding", stage.rounding, "is not supported by stage.format=gguf", "set stage.rounding=nearest")
    if kind != "int4":
        yield from _without_effect(stage, "group_size", f"with stage.quantize={kind}", "remove it, or set stage.quantize=int4")
    for key in ("symmetric", "granularity") if kind in _GGUF else ():
        yield from _without_effect(stage, key, "with stage.format=gguf, whose types fix it", "remove it")
    if not stage.calibration and not stage.held_out:
        yield from _without_effect(stage, "sample_tokens", "without stage.calibration and stage.held_out", "remove it, or set one of them")
    if stage.granularity == "tensor" and kind == "int4":
        rule = "applies to int8; int4 has a scale for each stage.group_size weights"
        yield Violation("stage.granularity", stage.granularity, rule, "remove it, or set stage.quantize=int8")
    if not stage.symmetric and kind == "int8_dynamic":
        rule = "is not supported by int8_dynamic: products of integers require weights without a zero point"
        yield Violation("stage.symmetric", False, rule, "set stage.symmetric=true, or stage.quantize=int8")
    yield from _rounding(stage)


def _without_effect(stage: Convert, key: str, where: str, fix: str) -> Iterator[Violation]:
    """A key that is not read has its default."""
    if (value := getattr(stage, key)) != getattr(Convert(name=stage.name), key):
        yield Violation(f"stage.{key}", value, f"has no effect {where}", fix)


def _rounding(stage: Convert) -> Iterator[Violation]:
    """GPTQ requires calibration documents; rounding to nearest does not read them."""
    if stage.rounding == "nearest" and stage.calibration:
        fix = "set stage.rounding=gptq; for the perplexity before and after, set stage.held_out"
        yield Violation("stage.calibration", stage.calibration, "has no effect with stage.rounding=nearest", fix)
    if stage.rounding == "gptq":
        if not stage.calibration:
            fix = "set it to files of documents like the training data: stage.calibration=[documents.jsonl]"
            yield Violation("stage.calibration", "[]", "is required by stage.rounding=gptq", fix)
        if stage.granularity == "tensor":
            rule = "is not supported by stage.rounding=gptq"
            yield Violation("stage.granularity", stage.granularity, rule, "set stage.granularity=channel")
