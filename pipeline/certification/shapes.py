"""Part "shapes": what is decided from shapes, evaluated at the full size of the job, on no rank and with no memory for weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup

from pipeline.certification.parts import PartReport
from pipeline.certification.plain_optimizers import plain_rate
from pipeline.config.layout import Coordinates, Layout
from pipeline.config.schema import RunConfig
from pipeline.layers.rotary import Rotary
from pipeline.models import registry
from pipeline.models.vectors import is_matrix
from pipeline.parallel import pieces as pieces_of_ranks
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel, partition_model
from pipeline.parallel.pieces import Piece
from pipeline.training.buckets import Bucket, build_buckets
from pipeline.training.lr_schedule import learning_rate

#: Offsets from here on do not fit into 32 bits.
LARGE = 2**31


@dataclass(frozen=True)
class _Group:
    """Stands for a process group: this rank's number and the number of ranks."""

    index: int
    ranks: int

    def rank(self) -> int:
        """See ProcessGroup."""
        return self.index

    def size(self) -> int:
        """See ProcessGroup."""
        return self.ranks


@dataclass(frozen=True)
class _Mesh:
    """Stands for a Mesh, with what buckets read of it."""

    layout: Layout
    coordinates: Coordinates

    def zero_groups(self, *, experts: bool) -> tuple[ProcessGroup, ProcessGroup | None]:
        """See Mesh."""
        rank = self.layout.rank(self.coordinates)
        shards, replicas = (
            cast(ProcessGroup, _Group(members.index(rank), len(members)))
            for members in self.layout.zero_members(self.coordinates, experts=experts)
        )
        return shards, replicas if replicas.size() > 1 else None


def report(config: RunConfig, world_size: int) -> PartReport:
    """Evaluate the division of every weight in the layout of the job, and compare it with the model of one process."""
    result = PartReport("shapes")
    layout = Layout.of(config, world_size)
    alone = replace(layout, pipeline=1, data=1, expert=1, context=1, tensor=1, stages_per_rank=1, schedule="1f1b", blocks=())
    whole = {piece.name: piece for piece in partition_model(config, alone, 0).pieces.values()}
    stages = [layout.layers(stage, config.model.layers) for stage in range(layout.stage_count)]
    if [block for blocks in stages for block in blocks] != list(range(config.model.layers)):
        result.failures.append(f"the stages have the blocks {stages}, the model has {config.model.layers}")
    largest = 0
    held: set[str] = set()
    for pipeline in _some(layout.pipeline):
        rank = layout.rank(Coordinates(pipeline, layout.data - 1, layout.expert - 1, layout.context - 1, layout.tensor - 1))
        model = partition_model(config, layout, rank)
        held |= {piece.name for piece in model.pieces.values()}
        result.failures += _other_blocks(layout, stages, pipeline, model)
        for bucket in build_buckets(model, cast(Mesh, _Mesh(layout, layout.coordinates(rank))), sequence_parallel=True):
            result.failures += _partitions(bucket)
            result.failures += [
                f"{piece.name} is {'' if bucket.decays else 'not '}decayed, with the shape {piece.full_shape}"
                for piece in bucket.pieces.values()
                if bucket.decays != (is_matrix(piece.name, whole[piece.name].full_shape) if piece.name in whole else bucket.decays)
            ]
            largest = max(largest, bucket.elements)
    result.failures += [f"{name} is not a weight of the model in one process" for name in sorted(held - whole.keys())]
    if layout.pipeline <= len(_some(layout.pipeline)):
        result.failures += [f"{name} is on no pipeline rank" for name in sorted(whole.keys() - held)]
    pieces = {name: pieces_by_rank(layout, piece) for name, piece in whole.items()}
    for name, parts in pieces.items():
        result.failures += [f"{name}: {problem}" for problem in _tiling(whole[name].full_shape, parts)]
    result.failures += [*_heads(config, layout, pieces), *wrong_rates(config), *wrong_rotations(config)]
    sizes = f"the largest bucket has {largest:,} elements" + (", more than 2^31" if largest >= LARGE else "")
    result.covered.append(
        f"pieces of {len(whole)} weights over {layout.tensor} tensor and {layout.expert} expert ranks, stages, heads, weight decay and "
        f"ZeRO's partitions, at full size on {world_size:,} ranks; {sizes}"
    )
    result.covered.append(
        f"learning rates of {config.training.steps:,} steps; rotary angles of {config.training.sequence_length:,} positions"
    )
    return result


def _some(count: int) -> list[int]:
    """Return the first ranks of an axis and the last one."""
    return sorted({0, min(1, count - 1), count // 2, count - 1})


def pieces_by_rank(layout: Layout, whole: Piece) -> dict[tuple[int, int], Piece]:
    """Return the pieces of a weight by tensor and expert rank, by the function that partitions the model."""
    return {
        (tensor, expert): pieces_of_ranks.slice_weight(
            *(whole.name, whole.full_shape, whole.role),
            {"tensor": (layout.tensor, tensor), "expert": (layout.expert, expert)},
            folded=layout.folded,
        )
        for tensor in range(layout.tensor)
        for expert in range(layout.expert)
    }


def _tiling(shape: tuple[int, ...], pieces: dict[tuple[int, int], Piece]) -> Iterator[str]:
    """Yield where the pieces of a weight overlap or leave a gap. Dims can be considered one by one, since every axis slices one dim."""
    boxes = {piece.box for piece in pieces.values()}
    for dim, size in enumerate(shape):
        ranges = sorted({box[dim] for box in boxes if box[dim][0] < box[dim][1]})
        ends = [(0, 0), *ranges, (size, size)]
        for (_, end), (start, _) in pairwise(ends):
            if start != end:
                yield f"its pieces along dim {dim} {'overlap' if start < end else 'leave a gap'} at {min(start, end):,} of {size:,}"


def _other_blocks(layout: Layout, stages: list[range], pipeline: int, model: LocalModel) -> Iterator[str]:
    """Yield whether the weights of a pipeline rank are not those of its blocks."""
    blocks = {block for stage in layout.stages(pipeline) for block in stages[stage]}
    names = [name.split(".") for stage in model.stage_modules() for name, _ in stage.named_parameters()]
    actual = {int(name[1]) for name in names if name[0] == "blocks"}
    if actual != blocks:
        yield f"pipeline rank {pipeline} has the blocks {sorted(actual)}, the layout says {sorted(blocks)}"


def _partitions(bucket: Bucket) -> Iterator[str]:
    """Yield the weights of a bucket whose elements the partitions of ZeRO do not hold exactly once."""
    ends: dict[nn.Parameter, int] = dict.fromkeys(bucket.pieces, 0)
    for index in range(bucket.ranks):
        other = Bucket(bucket.name, bucket.pieces, cast(ProcessGroup, _Group(index, bucket.ranks)), [], bucket.decays)
        for parameter, where in other.partition_slices().items():
            first = index * other.partition_elements + where.start - other.offsets[parameter]
            if first != ends[parameter]:
                yield f"{bucket.pieces[parameter].name}: partition {index} of {bucket.name} begins at {first:,}, not at {ends[parameter]:,}"
            ends[parameter] = first + where.stop - where.start
    for parameter, piece in bucket.pieces.items():
        if ends[parameter] != piece.elements:
            yield f"{piece.name}: the partitions of {bucket.name} hold {ends[parameter]:,} of {piece.elements:,} elements"


def _heads(config: RunConfig, layout: Layout, pieces: dict[str, dict[tuple[int, int], Piece]]) -> Iterator[str]:
    """Yield query heads that a tensor rank holds without their keys and values, in attention with one weight for each of them."""
    model: Any = config.model
    for name, parts in pieces.items():
        keys = pieces.get(name.replace(".query.", ".key."))
        if ".query.weight" not in name or keys is None:
            continue
        shared, width = model.heads // model.kv_heads, model.head_dim
        if hasattr(model, "heads_of"):
            kv_heads, width = model.heads_of(int(name.split(".")[1]))
            shared = model.heads // kv_heads
        if getattr(model, "linear_key_heads", 0) and not model.is_full(int(name.split(".")[1])):
            shared, width = 1, model.linear_key_dim  # linear attention has as many heads of queries as of keys
        for tensor in range(layout.tensor):
            query, key = parts[tensor, 0].box[0], keys[tensor, 0].box[0]
            if query != (key[0] * shared, key[1] * shared) or query[0] % width or query[1] % width:
                yield f"{name}: tensor rank {tensor} has the rows {query} of queries and {key} of keys, with heads of {width} rows"
                break


#: Of a longer run, so many steps are compared, in equal distances; and positions of a long context.
MOST = 10_000
#: Largest difference of two rates, relative to optimizer.lr.
RATE_TOLERANCE = 1e-9


def wrong_rates(config: RunConfig) -> Iterator[str]:
    """Yield the first step whose learning rate is not that of the second implementation."""
    steps, optimizer = config.training.steps, config.optimizer
    for step in (*range(0, steps, math.ceil(steps / MOST)), steps - 1):
        actual, expected = learning_rate(step, optimizer, config.training), plain_rate(step, optimizer, config.training)
        if not abs(actual - expected) <= RATE_TOLERANCE * optimizer.lr:
            yield f"the learning rate of step {step + 1} is {actual:.6g}, by the formula of {optimizer.schedule} {expected:.6g}"
            return


def wrong_rotations(config: RunConfig) -> Iterator[str]:
    """Yield tables of rotary embeddings whose angles do not grow in proportion to the position."""
    with torch.device("meta"):
        model = registry.build(config.model)
    for name, module in model.named_modules():
        if not isinstance(module, Rotary):
            continue
        module.compute_buffers(torch.device("cpu"))
        rows = min(len(module.cos), config.training.sequence_length)
        positions = torch.arange(0, rows, math.ceil(rows / MOST))
        half = module.head_dim // 2
        cos, sin = module.cos[positions, half:].double(), module.sin[positions, half:].double()
        angle, size = torch.atan2(module.sin[1, half:], module.cos[1, half:]).double(), torch.hypot(module.cos[1], module.sin[1])[half:]
        angles = positions[:, None] * angle
        error = torch.hypot(cos - size * angles.cos(), sin - size * angles.sin())
        # The angle of position 1 is read from numbers in fp32, and its error grows with the position.
        wrong = (error > 1e-4 + 4 * torch.finfo(torch.float32).eps * angles.abs()).any(dim=1)
        if bool(wrong.any()):
            first = int(wrong.int().argmax())
            yield f"{name}: the rotation of position {positions[first]} is not {positions[first]} times that of position 1"
