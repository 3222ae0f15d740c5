"""Rules of the group precision."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.schema import RunConfig


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules of 8-bit products, and of the sums of gradients."""
    if config.precision.reduce_dtype == "bf16" != config.precision.dtype:
        rule = f"requires precision.dtype=bf16, not {config.precision.dtype}"
        yield Violation("precision.reduce_dtype", "bf16", rule, "set it to fp32, or precision=bf16")
    key, fp8 = "precision.fp8", config.precision.fp8
    if fp8 == "none":
        return
    if config.precision.dtype != "bf16":
        yield Violation(key, fp8, f"requires precision.dtype=bf16, not {config.precision.dtype}", "set precision=fp8")
    if (rounding := config.training.fake_quantize) != "none":
        fix = f"remove it, or set training.fake_quantize=none instead of {rounding}"
        yield Violation(key, fp8, "is not supported with training.fake_quantize", fix)
    layers, excluded = config.model.layers, config.precision.fp8_exclude_layers
    if layers <= 2 * excluded:
        rule = f"multiplies no 8-bit numbers: precision.fp8_exclude_layers={excluded} excludes the first and last of model.layers={layers}"
        fix = f"set precision.fp8_exclude_layers={(layers - 1) // 2}, or precision=bf16"
        yield Violation(key, fp8, rule, fix)
    if config.lora.rank:
        yield Violation(key, fp8, "is not supported with adapters (lora.rank)", "set precision=bf16")
