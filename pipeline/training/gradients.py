"""What autograd leaves open: sums of gradients between ranks that hold the same weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.parallel.apply import LocalModel
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.tensor import sums_over_sequence

#: Elements of one all-reduce.
BUCKET_ELEMENTS = 1 << 26


def complete(model: LocalModel, mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Make every gradient that of the rank's whole batch share.

    With sequence parallelism a norm has seen this rank's rows only: its gradient is summed over the tensor ranks.
    An embedding tied across the first and the last stage lives on both: its two gradients are summed over them.
    """
    if sequence_parallel and mesh.layout.tensor > 1:
        sum_over(mesh.tensor, (p for p, piece in model.pieces.items() if sums_over_sequence(piece)))
    if mesh.ends is not None and any(_is_tied(model, p) for p in model.pieces):
        sum_over(mesh.ends, (p for p in model.pieces if _is_tied(model, p)))


def _is_tied(model: LocalModel, parameter: nn.Parameter) -> bool:
    return model.tied and model.pieces[parameter].name == "embed.tokens.weight"


def sum_over(group: ProcessGroup, parameters: Iterable[nn.Parameter], *, mean: bool = False) -> None:
    """Replace the gradients by their sum (or mean) over the group, a bucket at a time. A missing gradient counts as zero."""
    if group.size() == 1:
        return
    bucket: list[Tensor] = []
    held = 0
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        bucket.append(parameter.grad)
        held += parameter.numel()
        if held >= BUCKET_ELEMENTS:
            _reduce(bucket, group, mean)
            bucket, held = [], 0
    if bucket:
        _reduce(bucket, group, mean)


def _reduce(gradients: list[Tensor], group: ProcessGroup, mean: bool) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    if mean:
        flat /= group.size()
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def is_counted(model: LocalModel, mesh: Mesh, parameter: nn.Parameter) -> bool:
    """Whether this rank's copy of a weight stands for it in the global norm and in a checkpoint.

    Pieces always do, whole weights on tensor rank 0 only, the head's copy of a tied embedding never.
    """
    piece = model.pieces[parameter]
    return not piece.copy and (piece.dim is not None or mesh.where.tensor == 0)


def global_norm(model: LocalModel, mesh: Mesh) -> Tensor:
    """The 2-norm of the whole model's gradient, after the reduction over data: a 0-dim fp32 tensor, the same on every rank."""
    counted = [p.grad for p in model.pieces if p.grad is not None and is_counted(model, mesh, p)]
    norms = torch.stack(torch._foreach_norm(counted)) if counted else torch.zeros(1, device=mesh.device)
    square = norms.square().sum()
    if mesh.model.size() > 1:
        dist.all_reduce(square, group=mesh.model)
    return square.sqrt()
