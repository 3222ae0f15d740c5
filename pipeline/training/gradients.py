"""What autograd leaves open: sums of gradients between ranks that hold the same weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.parallel.pieces import Piece
from pipeline.parallel.tensor import sums_over_tensor

#: Elements of one all-reduce.
BUCKET_ELEMENTS = 1 << 26


def finalize_gradients(model: LocalModel, mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Make every gradient the mean over what the ranks with other data indices do not see; the mean over these remains.

    - A norm on rows that are cut along the sequence, or a weight that tensor ranks hold whole within their region, has a part of its
      gradient on each tensor rank: the sum is the whole.
    - An embedding tied across the first and the last stage, or a weight that all stages hold, has a part on each.
    - An expert has seen the tokens of all ranks of the expert axis, every other weight those of its own samples: one is divided, the
      other averaged.
    """
    pieces = model.pieces.items()
    if mesh.layout.tensor > 1:
        sum_over(mesh.tensor, ((p, piece) for p, piece in pieces if sums_over_tensor(piece, sequence=sequence_parallel)))
    if mesh.tied_embedding is not None:
        sum_over(mesh.tied_embedding, ((p, piece) for p, piece in pieces if piece.shared == "tied_embedding"))
    if mesh.layout.pipeline > 1:
        sum_over(mesh.pipeline, ((p, piece) for p, piece in pieces if piece.shared == "pipeline"))
    if mesh.layout.expert > 1:
        sum_over(mesh.expert, ((p, piece) for p, piece in pieces if not piece.is_sliced_along("expert")), mean=True)
        for gradient in (p.grad for p, piece in pieces if piece.is_sliced_along("expert")):
            if gradient is not None:
                gradient /= mesh.layout.expert


def sum_over(group: ProcessGroup, pieces: Iterable[tuple[nn.Parameter, Piece]], *, mean: bool = False) -> None:
    """Replace the gradients by their sum (or mean) over the group, a bucket at a time. A missing gradient counts as zero."""
    if group.size() == 1:
        return
    bucket: list[Tensor] = []
    held = 0
    for parameter, piece in pieces:
        if parameter.grad is None:
            # ZeRO 3 has taken the weight itself away. A gradient must have the weight's shape when it is set, but not afterwards.
            parameter.grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            parameter.grad.data = torch.zeros(piece.shape, dtype=torch.float32, device=parameter.device)
        bucket.append(parameter.grad)
        held += piece.elements
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


def is_primary_copy(piece: Piece, mesh: Mesh) -> bool:
    """Whether this rank's copy of a piece represents it in the global norm and in a checkpoint.

    A sliced piece always does. A weight that every rank of an axis holds whole is represented by the first of them, and one that several
    pipeline stages hold by the first stage.
    """
    index = {"tensor": mesh.where.tensor, "expert": mesh.where.expert}
    return not piece.copy and all(piece.is_sliced_along(axis) or place == 0 for axis, place in index.items())
