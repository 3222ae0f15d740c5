"""Gradient clipping by the global norm (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063), and steps that are skipped.

PyTorch's optimizers divide by `grad_scale` and skip by `found_inf`, without a wait for the device (weight_update.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pipeline.common.errors import UserError
from pipeline.parallel.mesh import reduce_over

CPU_ROW = 4096
"""Elements that a CPU adds in fp32: one sum over 5e6 of them is 1e-4 off, sums of 4096 agree with fp64 to 1e-9."""


def square_sum(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements of some fp32 gradients, fp64, 0-dim."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.cat(list(map(_row_norms, gradients))) if device.type == "cpu" else torch.stack(torch._foreach_norm(gradients))
    return norms.double().square().sum()  # in fp32, the groups of an axis could round the same sum differently, and copies would part


def _row_norms(gradient: Tensor) -> Tensor:
    """Return the norms of the rows of ``CPU_ROW`` elements of a gradient, 1-dim; the last one is that of the remainder."""
    flat = gradient.flatten()
    rows, rest = flat.split([flat.numel() - flat.numel() % CPU_ROW, flat.numel() % CPU_ROW])
    return torch.cat([torch.linalg.vector_norm(rows.view(-1, CPU_ROW), dim=1), torch.linalg.vector_norm(rest, keepdim=True)])


def global_norm(gradients: list[Tensor], groups: Iterable[ProcessGroup], device: torch.device) -> Tensor:
    """Return the 2-norm of the full model's gradient.

    Args:
        gradients: this rank's part; every element of the full gradient is on one rank of the groups.
        groups: the squares are summed over one after the other.

    Returns:
        0-dim, fp32, the same on every rank.
    """
    square = square_sum(gradients, device)
    reduce_over(groups, square)
    return square.sqrt().float()


def divisor(norm: Tensor, largest: float, loss_scale: Tensor | None = None) -> Tensor | None:
    """The 0-dim tensor by which gradients are divided before the update, None for 1.

    Args:
        norm: their norm, without the loss scale.
        largest: the norm is at most this afterwards; 0 for no clipping.
        loss_scale: factor that the gradients still have; None for 1.
    """
    if largest == 0:
        return loss_scale
    clipping = ((norm + 1e-6) / largest).clamp(min=1.0)
    return clipping if loss_scale is None else clipping * loss_scale


def is_skipped(gradient_norm: Tensor) -> Tensor:
    """Return 1.0 if a step with this global gradient norm changes nothing, else 0.0; 0-dim, on the device of the norm."""
    return (~gradient_norm.isfinite()).float()


class SkippedSteps:
    """Counts the steps in a row that were skipped, at `most` training.max_skipped_steps."""

    def __init__(self, most: int) -> None:
        self._most, self._in_a_row = most, 0

    def count(self, *, skipped: bool) -> None:
        """Count a step.

        Raises:
            UserError: too many steps in a row were skipped.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row >= self._most:
            rule = f"{self._in_a_row} steps in a row were skipped: their gradients are not finite"
            fix = "reduce optimizer.lr, or continue from an older checkpoint; metrics.jsonl shows where the loss diverges"
            raise UserError.of("training.max_skipped_steps", self._most, rule, fix)
