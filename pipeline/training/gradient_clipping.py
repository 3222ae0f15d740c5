"""Gradient clipping by the global norm (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063). DeepSpeed clips under ZeRO 1 to 3."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.training.gradients import is_primary_copy


def global_norm(model: LocalModel, mesh: Mesh) -> Tensor:
    """Return the 2-norm of the full model's gradient, after the reduction over data: 0-dim, fp32, the same on every rank."""
    primary = [p.grad for p, piece in model.pieces.items() if p.grad is not None and is_primary_copy(piece, mesh)]
    norms = torch.stack(torch._foreach_norm(primary)) if primary else torch.zeros(1, device=mesh.device)
    square = norms.square().sum()
    if mesh.model.size() > 1:
        dist.all_reduce(square, group=mesh.model)
    return square.sqrt()


def clipping_divisor(norm: Tensor, largest: float) -> Tensor:
    """The 0-dim tensor by which gradients of this norm are divided, so that the norm is at most `largest`; at least 1."""
    return ((norm + 1e-6) / largest).clamp(min=1.0)
