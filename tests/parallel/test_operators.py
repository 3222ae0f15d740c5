"""Every custom operator passes all checks of torch.library.opcheck: schema, shapes on fake tensors, and gradients in compiled code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeline
from pipeline.layers.position_bias import AlibiSlopes

#: Those of the dry run and the planner, which have no values: they exist on the meta device alone.
WITHOUT_VALUES = {"planner::rms_norm", "planner::rms_norm_backward"}
RING = {"pipeline::ring_attention", "pipeline::ring_attention_backward"}
BATCH, HEADS, KV_HEADS, TOKENS, WIDTH = 2, 4, 2, 8, 16


def failures(operator: Any, arguments: tuple[Any, ...], **options: Any) -> list[str]:
    """The checks that a call does not pass."""
    results = torch.library.opcheck(operator, arguments, options, raise_exception=False)
    assert len(results) >= 4
    return [f"{operator} {name}: {result}" for name, result in results.items() if result != "SUCCESS"]


def test_every_operator_is_checked() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in Path(pipeline.__file__).parent.rglob("*.py"))
    assert set(re.findall(r"(?:custom_op|triton_op)\(\s*\"([^\"]+)\"", source)) == WITHOUT_VALUES | RING
    assert not re.findall(r"Library\(\s*\"", source), "operators that are defined in another way must be checked, too"


def test_operators_of_the_planner() -> None:
    from pipeline.planner import norm_kernel  # noqa: F401 - registers them

    x, weight = torch.empty(2, 3, WIDTH, device="meta"), torch.empty(WIDTH, device="meta")
    found = failures(torch.ops.planner.rms_norm.default, (x.clone().requires_grad_(), weight.clone().requires_grad_()))
    scale = x.new_empty(2, 3, 1)
    assert found + failures(torch.ops.planner.rms_norm_backward.default, (x, x.clone(), weight, scale)) == []


def _ring(
    dtype: torch.dtype, masks: tuple[Tensor | None, ...], causal: bool, window: int | None, softcap: float | None, *, sinks: bool = False
) -> list[str]:
    """The checks that fail on this rank, forward and backward, over all ranks."""
    import torch.distributed as dist

    from pipeline.parallel import ring_attention  # noqa: F401 - registers them

    group = dist.group.WORLD
    assert group is not None
    options = {"group": group.group_name, "causal": causal, "window": window, "scale": None, "softcap": softcap}
    chance = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (torch.randn(BATCH, heads, TOKENS, WIDTH, generator=chance).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    own = torch.randn(HEADS, generator=chance, requires_grad=True) if sinks else None
    out, logsumexp = torch.ops.pipeline.ring_attention.default(q, k, v, *masks, None if own is None else own.detach(), **options)
    grads = [x.clone().requires_grad_() for x in (q, k, v)]
    found = failures(torch.ops.pipeline.ring_attention.default, (*grads, *masks, own), **options)
    backward = (torch.randn_like(out), q, k, v, out, logsumexp, *masks)
    return found + failures(torch.ops.pipeline.ring_attention_backward.default, backward, **options)


def _rings(numbers: tuple[int, ...], sinks: bool) -> list[str]:
    """The checks that fail on this rank, with these masks, or with sinks."""
    import torch.distributed as dist

    from pipeline.parallel.ring_layout import segment_limits

    ends = torch.arange(TOKENS, dtype=torch.int32).expand(dist.get_world_size(), BATCH, TOKENS) // 3
    prefix = torch.tensor([3, 5])
    cases: list[tuple[torch.dtype, tuple[Tensor | None, ...], bool, int | None, float | None]] = [
        (torch.float32, (None, None, None, None), True, None, None),
        (torch.bfloat16, (None, None, None, None), False, None, 5.0),
        (torch.bfloat16, (ends, None, AlibiSlopes(HEADS)(), None), True, 5, None),
        (torch.float32, (None, None, None, prefix), True, None, None),
        (torch.bfloat16, (ends, segment_limits(ends, dist.get_rank(), causal=True), None, None), True, None, None),
    ]
    found = [line for number in numbers for line in _ring(*cases[number])]
    return found + (_ring(torch.float32, (None, None, None, None), True, None, None, sinks=True) if sinks else [])


@pytest.mark.parametrize("masks, sinks", [((2,), True), pytest.param((0, 1, 3, 4), False, marks=pytest.mark.long)])
def test_operators_of_the_ring(worlds, masks, sinks) -> None:
    assert worlds(2).run(_rings, masks, sinks) == [[]] * 2
