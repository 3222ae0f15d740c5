"""Gradient clipping by the global norm (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def global_norm(gradients: list[Tensor], groups: Iterable[ProcessGroup], device: torch.device) -> Tensor:
    """Return the 2-norm of the full model's gradient.

    Args:
        gradients: this rank's part; every element of the full gradient is on one rank of the groups.
        groups: the squares are summed over one after the other.
        device: of the result.

    Returns:
        0-dim, fp32, the same on every rank.
    """
    norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1, device=device)
    square = norms.square().sum()
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(square, group=group)
    return square.sqrt()


def clipping_divisor(norm: Tensor, largest: float) -> Tensor:
    """The 0-dim tensor by which gradients of this norm are divided, so that the norm is at most `largest`; at least 1."""
    return ((norm + 1e-6) / largest).clamp(min=1.0)
