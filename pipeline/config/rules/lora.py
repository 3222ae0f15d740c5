"""Rules of the group lora."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common.errors import Violation
from pipeline.config.lora import LoraConfig
from pipeline.config.schema import RunConfig


def violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the violated rules of adapters."""
    lora, rounding = config.lora, config.training.fake_quantize
    if lora.quantize != "none" and not lora.rank:
        rule = "requires adapters: weights in 4 bits are not trained"
        yield Violation("lora.quantize", lora.quantize, rule, "set lora.rank, for example 16")
    if lora.modules_to_save and not lora.rank:
        rule = "are trained beside adapters, and there are none"
        fix = "set lora.rank, for example 16; training.frozen selects weights without adapters"
        yield Violation("lora.modules_to_save", ", ".join(lora.modules_to_save), rule, fix)
    if lora.rank and rounding != "none":
        fix = f"remove it, or set training.fake_quantize=none instead of {rounding}"
        yield Violation("lora.rank", lora.rank, "is not supported with training.fake_quantize", fix)


def stage_violations(lora: LoraConfig, stage: str) -> Iterator[Violation]:
    """Yield a violation if the stage does not read the group."""
    if lora.rank and stage == "certify":
        yield Violation("lora.rank", lora.rank, f"is not supported by stage={stage}", "remove it, for the job that trains all weights")
