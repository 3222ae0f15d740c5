"""Rules of the group precision."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import UserError, Violation
from pipeline.config import hardware
from pipeline.config.schema import RunConfig

#: Compute capability of the GPUs with 8-bit products of experts (Hopper).
EXPERTS_CAPABILITY = "9.0"


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules of 8-bit products, and of the sums of gradients."""
    if config.precision.reduce_dtype == "bf16" != config.precision.dtype:
        rule = f"requires precision.dtype=bf16, not {config.precision.dtype}"
        yield Violation("precision.reduce_dtype", "bf16", rule, "set it to fp32, or precision=bf16")
    yield from _experts(config)
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
    if (gpu := _gpu(config)) is not None and not gpu.tflops_fp8:
        rule = f"requires a GPU with 8-bit products; cluster.hardware={config.cluster.hardware} is {gpu.name}"
        yield Violation(key, fp8, rule, "set precision=bf16")


def _gpu(config: RunConfig) -> hardware.Hardware | None:
    """The GPU of the cluster; None if it is not known."""
    try:
        return None if config.cluster.hardware is None else hardware.load(config.cluster.hardware)
    except UserError:  # the rules of cluster report it
        return None


def _experts(config: RunConfig) -> Iterator[Violation]:
    """8-bit products of experts are a part of fp8, and PyTorch has a kernel for them on Hopper only."""
    key = "precision.fp8_experts"
    if not config.precision.fp8_experts:
        return
    if config.precision.fp8 == "none":
        yield Violation(key, True, "requires precision.fp8, not none", "set precision=fp8")
    if not getattr(config.model, "experts", 0):
        rule = f"requires an MoE model; model.family={config.model.family} has no experts"
        yield Violation(key, True, rule, "set it to false, or choose an MoE model (model=mixtral-8x7b)")
    if (gpu := _gpu(config)) is not None and gpu.capability != EXPERTS_CAPABILITY:
        yield Violation(key, True, f"requires a Hopper GPU; cluster.hardware={config.cluster.hardware} is {gpu.name}", "set it to false")
