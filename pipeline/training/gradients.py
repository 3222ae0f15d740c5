"""Gradient reduction between ranks that hold the same weight, and the global gradient norm."""

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

#: Bucket size of an all-reduce, in elements.
BUCKET_ELEMENTS = 1 << 26


def finalize_gradients(model: LocalModel, mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Reduce all gradients over the tensor, pipeline and expert axes; the mean over the data axis remains to be taken.

    - With sequence parallelism, norms have partial gradients on each tensor rank, as have weights that are replicated within a
      tensor-parallel region: they are summed.
    - An embedding tied across the first and the last stage, or a weight that all stages hold, has a partial gradient on each: summed.
    - An expert processes the tokens of all expert ranks, so its gradient is divided by their number; the gradient of any other weight
      covers the local samples only and is averaged over the expert ranks.
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
    """All-reduce the gradients over the group (sum or mean), in buckets. A missing gradient counts as zero."""
    if group.size() == 1:
        return
    bucket: list[Tensor] = []
    elements = 0
    for parameter, piece in pieces:
        if parameter.grad is None:
            # ZeRO 3 has released the weight. torch checks the shape of a gradient only when it is assigned.
            parameter.grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            parameter.grad.data = torch.zeros(piece.shape, dtype=torch.float32, device=parameter.device)
        bucket.append(parameter.grad)
        elements += piece.elements
        if elements >= BUCKET_ELEMENTS:
            _all_reduce_bucket(bucket, group, mean)
            bucket, elements = [], 0
    if bucket:
        _all_reduce_bucket(bucket, group, mean)


def _all_reduce_bucket(gradients: list[Tensor], group: ProcessGroup, mean: bool) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    if mean:
        flat /= group.size()
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def is_primary_copy(piece: Piece, mesh: Mesh) -> bool:
    """Whether this rank's copy of a piece is the one that counts in the global norm and is saved in a checkpoint.

    True for a piece that is sharded over an axis. Of a weight that is replicated over an axis, rank 0 of the axis holds the primary copy;
    of a weight that several pipeline stages hold, the first stage does.
    """
    index = {"tensor": mesh.coordinates.tensor, "expert": mesh.coordinates.expert}
    return not piece.copy and all(piece.is_sliced_along(axis) or coordinate == 0 for axis, coordinate in index.items())
