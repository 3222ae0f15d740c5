"""Rules of adapters, quantization-aware training and longer contexts. All violations are collected."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config import warmup
from pipeline.config.schema import RunConfig


def stage_violations(config: RunConfig) -> Iterator[Violation]:
    """Stages that do not read these settings."""
    for key, value, plain, job in (
        ("lora.rank", config.lora.rank, 0, "the job that trains all weights"),
        ("training.fake_quantize", config.training.fake_quantize, "none", "the job without rounding"),
        ("training.attention_group", config.training.attention_group, 0, "full attention"),
    ):
        if value != plain and config.stage.name in ("certify", "plan"):
            yield Violation(key, value, f"is not supported by stage={config.stage.name}", f"remove it, for {job}")
    if config.training.context_factor != 1 and config.stage.name != "finetune":
        rule = f"is read by stage=finetune only, not by {config.stage.name}"
        fix = "remove it; pretrain is told its context by model.max_positions and model.rope_scaling"
        yield Violation("training.context_factor", config.training.context_factor, rule, fix)


def violations(config: RunConfig) -> Iterator[Violation]:
    """Rules between these settings, and with those of the run."""
    yield from _attention_group(config)
    training = config.training
    if config.lora.quantize != "none" and not config.lora.rank:
        rule = "requires adapters: weights in 4 bits are not trained"
        yield Violation("lora.quantize", config.lora.quantize, rule, "set lora.rank, for example 16")
    if config.lora.modules_to_save and not config.lora.rank:
        rule = "are trained beside adapters, and there are none"
        fix = "set lora.rank, for example 16; training.frozen selects weights without adapters"
        yield Violation("lora.modules_to_save", ", ".join(config.lora.modules_to_save), rule, fix)
    for key, value in (("precision.fp8", config.precision.fp8), ("lora.rank", config.lora.rank)):
        if training.fake_quantize != "none" and value not in ("none", 0):
            rule = "is not supported with training.fake_quantize"
            yield Violation(key, value, rule, f"remove it, or set training.fake_quantize=none instead of {training.fake_quantize}")
    if config.precision.fp8 != "none" and config.lora.rank:
        yield Violation("precision.fp8", config.precision.fp8, "is not supported with adapters (lora.rank)", "set precision=bf16")


def _attention_group(config: RunConfig) -> Iterator[Violation]:
    """Shifted sparse attention splits every sequence into groups."""
    training, key = config.training, "training.attention_group"
    if not (group := training.attention_group):
        return
    if group % 2:
        yield Violation(key, group, "must be even: groups are shifted by half their size", f"set it to {group + 1}")
    for name, length in warmup.keyed_values(training.sequence_warmup, "sequence_length", training.sequence_length):
        if length > group and length % group:
            rule = f"must be a multiple of {key}={group}"
            yield Violation(name, length, rule, f"set it to {length - length % group}, or choose another group")
    if config.parallel.context > 1:
        rule = f"splits sequences over ranks, and {key}={group} splits them into groups"
        yield Violation("parallel.context", config.parallel.context, rule, f"set it to 1, or {key}=0")
    if config.model.objective != "causal":
        yield Violation(key, group, f"is supported by decoders only; model.family={config.model.family} is none", f"set {key}=0")
