"""Gradient buckets: the weights of a transformer block share one flat fp32 gradient, which is reduced with one collective.

A bucket is also the unit of ZeRO: its flat weights, gradients and optimizer state are divided into one equal partition per rank. Under
ZeRO 0 every rank holds the one partition, which is all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.checkpoint.fragments import Fragment
from pipeline.models.vectors import is_matrix
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.parallel.pieces import Piece
from pipeline.parallel.tensor_parallel import sums_over_tensor
from pipeline.training.matrix_rule import ADAMW, MatrixRule


@dataclass(eq=False)
class Bucket:
    """Weights with one flat gradient, in order, padded at the end such that it divides into equal partitions.

    Attributes:
        name: for messages and tests.
        pieces: weight -> its piece of the full weight.
        group: the ranks that hold the same weights, or with parallel.zero_group those of them over which ZeRO shards.
        sharded: whether each rank of the group holds another partition: ZeRO 1 to 3.
        tensor_sums: weights whose gradient is first summed over the tensor ranks.
        decays: whether weight decay applies.
        muon: whether Muon updates the weights.
        replicas: the ranks of the other groups of ZeRO that have the same partition; None if there are none.
        rate: learning rate of the weights as a factor of optimizer.lr.
        offsets: weight -> its first element in the flat gradient.
        elements: number of elements of the flat gradient, including the padding.
    """

    name: str
    pieces: dict[nn.Parameter, Piece]
    group: ProcessGroup
    tensor_sums: list[nn.Parameter]
    decays: bool
    muon: bool = False
    sharded: bool = True
    replicas: ProcessGroup | None = None
    rate: float = 1.0
    offsets: dict[nn.Parameter, int] = field(init=False)
    elements: int = field(init=False)

    def __post_init__(self) -> None:
        self.offsets, end = {}, 0
        for parameter, piece in self.pieces.items():
            self.offsets[parameter] = end
            end += piece.elements
        self.elements = padded_elements(end, self.group.size())

    @property
    def ranks(self) -> int:
        """Number of partitions."""
        return self.group.size() if self.sharded else 1

    @property
    def start(self) -> int:
        """First element of this rank's partition."""
        return self.group.rank() * self.partition_elements if self.sharded else 0

    @property
    def replica(self) -> int:
        """Number of this rank among those with the same partition."""
        return 0 if self.replicas is None else self.replicas.rank()

    @property
    def partition_elements(self) -> int:
        """Number of elements of a rank's partition."""
        return self.elements // self.ranks

    def view(self, flat: Tensor, parameter: nn.Parameter) -> Tensor:
        """The elements of a weight in a flat tensor of this bucket, in the weight's shape."""
        piece = self.pieces[parameter]
        return flat.narrow(0, self.offsets[parameter], piece.elements).view(piece.shape)

    def partition(self, flat: Tensor) -> Tensor:
        """This rank's partition of a flat tensor of this bucket, a view."""
        return flat.narrow(0, self.start, self.partition_elements)

    def joint_view(self, flat: Tensor, weights: Sequence[nn.Parameter]) -> Tensor | None:
        """The rows of some matrices below one another, as a view of a flat tensor of this bucket; None if they are not successive in it."""
        start = end = self.offsets[weights[0]]
        for weight in weights:
            if self.offsets.get(weight) != end:
                return None
            end += self.pieces[weight].elements
        return flat[start:end].view(-1, *weights[0].shape[1:])

    def partition_slices(self) -> dict[nn.Parameter, slice]:
        """Weight -> its slice of this rank's partition; without the weights that are not in the partition."""
        slices = {}
        for parameter, offset in self.offsets.items():
            first = max(offset - self.start, 0)
            last = min(offset - self.start + self.pieces[parameter].elements, self.partition_elements)
            if first < last:
                slices[parameter] = slice(first, last)
        return slices


def build_buckets(
    model: LocalModel,
    mesh: Mesh,
    *,
    sequence_parallel: bool,
    pieces: Mapping[nn.Parameter, Piece] | None = None,
    rule: MatrixRule = ADAMW,
    sharded: bool = True,
) -> list[Bucket]:
    """Assign every weight of the rank to a bucket: the trained ones, or those of `pieces`.

    The matrices of a block are a bucket, those of its experts another one, since fewer ranks hold the same experts. Embedding and head are
    a bucket each. A weight that several pipeline stages hold is a bucket of its own. All vectors (norms and biases: one in ten thousand
    elements) form one last bucket. Weights whose learning rates have different factors are in different buckets, and so are matrices that
    Muon updates by the rule and those beside them that AdamW updates.
    """
    units = _units(model)
    members: dict[tuple[str, str, float], dict[nn.Parameter, Piece]] = {}
    for parameter, piece in (model.pieces if pieces is None else pieces).items():
        replicas = "expert" if piece.is_sliced_along("expert") else "dense"
        matrix, muon = is_matrix(piece.name, piece.full_shape), rule.is_hidden(piece)
        bucket = bucket_name(piece.name, units[parameter], matrix=matrix, shared=bool(piece.shared), muon=muon)
        members.setdefault((bucket, replicas, rule.rate_of(piece)), {})[parameter] = piece
    ordered, sums = sorted(members, key=lambda key: key[0] == VECTORS), mesh.layout.tensor > 1
    groups = {"dense": mesh.zero_groups(experts=False), "expert": mesh.zero_groups(experts=True)}
    return [
        Bucket(
            name=" ".join((unit, replicas) if rate == 1 else (unit, replicas, f"lr x {rate:.6g}")),
            pieces=(held := members[unit, replicas, rate]),
            group=groups[replicas][0],
            replicas=groups[replicas][1],
            tensor_sums=[p for p, piece in held.items() if sums and sums_over_tensor(piece, sequence=sequence_parallel)],
            decays=all(is_matrix(piece.name, piece.full_shape) for piece in held.values()),
            muon=all(rule.is_hidden(piece) for piece in held.values()),
            sharded=sharded,
            rate=rate,
        )
        for unit, replicas, rate in ordered
    ]


def _units(model: LocalModel) -> dict[nn.Parameter, str]:
    """Weight -> the first block that holds it, or else the first other module of the stage."""
    units: dict[nn.Parameter, str] = {}
    for index, stage in model.stages.items():
        for name, parameter in stage.named_parameters():
            parts = name.split(".")
            unit = ".".join(parts[: 2 if parts[0] == "blocks" else 1])
            units.setdefault(parameter, f"stage {index} {unit}")
    return units


def is_primary_copy(piece: Piece, mesh: Mesh, *, sharded: bool = False) -> bool:
    """Whether this rank's copy of a piece is the one that counts in the global norm and is saved in a checkpoint.

    True for a piece that is sharded over an axis. Of a weight that is replicated over an axis, rank 0 of the axis holds the primary copy;
    of a weight that several pipeline stages hold, the first stage does.

    Args:
        sharded: whether this is about a partition of the piece (ZeRO): dense weights are then partitioned over the expert axis, too.
    """
    axes = {"tensor": mesh.coordinates.tensor, "expert": 0 if sharded else mesh.coordinates.expert}
    return not piece.copy and all(piece.is_sliced_along(axis) or coordinate == 0 for axis, coordinate in axes.items())


def partition_fragments(bucket: Bucket, mesh: Mesh, flat: Mapping[str, Tensor]) -> list[Fragment]:
    """Return the fragments of this rank's partition of a bucket.

    Args:
        flat: kind -> the partition, flat; the fragments are views of it.
    """
    divided = bucket if bucket.sharded else None
    return [
        Fragment(
            bucket.pieces[parameter],
            bucket.start + where.start - bucket.offsets[parameter],
            {kind: values[where] for kind, values in flat.items()},
            *replica_of(bucket.pieces[parameter], mesh, divided),
        )
        for parameter, where in bucket.partition_slices().items()
    ]


def replica_of(piece: Piece, mesh: Mesh, bucket: Bucket | None = None) -> tuple[int, int, str]:
    """Return which of the ranks that hold the same elements of a piece this rank is: Fragment.replica, replicas and group.

    Args:
        bucket: that ZeRO divides into partitions; the elements are those of this rank's partition.
    """
    layout, where = mesh.layout, mesh.coordinates
    axes = {"data": (layout.data, where.data), "context": (layout.context, where.context), "expert": (layout.expert, where.expert)}
    if bucket is not None:
        ranks = 1 if bucket.replicas is None else bucket.replicas.size()
        axes = {"experts' ZeRO groups" if piece.is_sliced_along("expert") else "ZeRO groups": (ranks, bucket.replica)}
    elif piece.is_sliced_along("expert"):
        del axes["expert"]
    if not piece.is_sliced_along("tensor"):
        axes["tensor"] = (layout.tensor, where.tensor)
    if piece.shared == "tied_embedding":
        holders = {layout.holder(stage): None for stage in (0, layout.stage_count - 1)}
        axes["tied_embedding"] = (len(holders), list(holders).index(where.pipeline))
    elif piece.shared == "pipeline":
        axes["pipeline"] = (layout.pipeline, where.pipeline)
    replica, replicas = 0, 1
    for size, index in axes.values():
        replica, replicas = replica * size + index, replicas * size
    if bucket is not None and "tensor" in axes and any(_is_uneven(other, layout.tensor) for other in bucket.pieces.values()):
        return replica, 1, "uneven"  # the tensor ranks' partitions have other elements: those of the primary copy are written
    return replica, replicas, "+".join(axis for axis, (size, _) in axes.items() if size > 1)


def _is_uneven(piece: Piece, ranks: int) -> bool:
    """Whether the tensor ranks' pieces differ in size."""
    return any(s.axis == "tensor" and piece.full_shape[s.dim] % ranks for s in piece.slices)


#: Name of the bucket of all vectors.
VECTORS = "vectors"
#: Elements to which partitions are aligned, 256 bytes in 16 bits: NCCL and vectorized kernels are slower if they are not at 16 bytes.
ALIGNMENT = 128


def bucket_name(name: str, unit: str, *, matrix: bool, shared: bool, muon: bool = False) -> str:
    """Return the bucket of a weight, among the weights that the same ranks hold.

    Args:
        name: of the weight in the full model.
        unit: the block that holds it, or the embedding, the head or another module of the stage.
        shared: whether several pipeline stages hold it.
        muon: whether Muon updates it: it then has other state than the matrices beside it that AdamW updates.
    """
    if shared:
        return name
    if not matrix:
        return VECTORS
    return f"{unit} muon" if muon else unit


def padded_elements(elements: int, ranks: int) -> int:
    """Return the elements of a bucket with the padding that divides it into one partition per rank.

    Partitions start at multiples of ALIGNMENT elements.
    """
    alignment = ALIGNMENT * ranks
    return math.ceil(elements / alignment) * alignment
