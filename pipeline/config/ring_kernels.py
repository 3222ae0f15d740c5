"""Settings with which ring attention has no fused kernel on a GPU: what they cost, and the nearest setting that is fast. Loads no torch.

They follow the rules of layers/attention_kernel.py (choose_partial), which decides; tests/planner/test_ring_formula.py compares both.
Documents alone have a fused kernel (layers/document_attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES, plans_other_layouts

#: Keys of the sliding window of some or all layers.
_WINDOWS = ("window", "banded_window")
#: Stages that run or predict the configured training job.
_STAGES = (*TRAINING_STAGES, "plan", "rehearse")
#: Families with ALiBi.
_SLOPES = ("bloom",)


def causes(config: RunConfig) -> Iterator[str]:
    """Yield the settings of a job because of which ring attention computes the unfused formula; none without a ring."""
    parallel, model = config.parallel, config.model
    if parallel.context == 1 or parallel.context_kind != "ring":
        return
    for name in _WINDOWS:
        if (window := getattr(model, name, None)) is not None and window < config.training.sequence_length:
            yield f"model.{name}={window}"
    if model.family in _SLOPES:
        yield f"ALiBi (model.family={model.family})"
    if (softcap := getattr(model, "attn_logit_softcapping", None)) is not None:
        yield f"model.attn_logit_softcapping={softcap:g}"
    if config.precision.dtype == "fp32":
        yield "precision.dtype=fp32"
    for width in sorted({model.head_dim, getattr(model, "global_head_width", model.head_dim)}):
        if width % 8 or width > 256 or getattr(model, "v_head_dim", 0) > width:
            yield f"heads of {width} columns"


def notice(config: RunConfig) -> str:
    """Return a warning about a job whose ring attention is slow, with the nearest setting that is fast; empty for other jobs."""
    trains = config.stage.name in _STAGES and not plans_other_layouts(config.stage)
    if not trains or not (reasons := list(causes(config))):
        return ""
    rule = f"has no fused kernel with {' and '.join(reasons)}: attention takes 10 to 30 times as long on a GPU"
    return f"parallel.context_kind=ring {rule}; {_faster(config, reasons)}"


def _faster(config: RunConfig, reasons: list[str]) -> str:
    """Return the nearest setting with a fused kernel: Ulysses with as many ranks, or with fewer, so that each has whole heads."""
    parallel, model = config.parallel, config.model
    sizes = [size for size in range(parallel.context, 1, -1) if parallel.context % size == 0]
    heads = {model.heads, model.kv_heads, getattr(model, "global_kv_heads", None) or model.kv_heads}
    whole = [size for size in sizes if not any(count % (parallel.tensor * size) for count in heads)]
    if not whole:
        return f"remove {' and '.join(reasons)}, or set parallel.context=1"
    fewer = f" and parallel.context={whole[0]}, which divides model.kv_heads={model.kv_heads}" if whole[0] < parallel.context else ""
    return f"set parallel.context_kind=ulysses{fewer}"
